"""A thread that waits in calls which nothing can interrupt, so that whoever needs what comes of them can be woken.

Gloo wakes all that wait in a connection as it breaks, but for who waits for a message of which a part has come or gone:
that one it leaves waiting until the group's timeout, whatever is closed meanwhile.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

LOOK_S = 0.1
"""Between two looks whether what is waited for can still come."""


class Waiter:
    """Calls one after the other, on a thread that begins with the first of them. One thread asks, any may leave.

    Args:
        lost: whether what the calls wait for can come no more, though the calls do not say so.
    """

    def __init__(self, name: str, lost: Callable[[], bool] = lambda: False) -> None:
        self._name = name
        self._lost = lost
        self._calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._heard: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        """What came of each call: its value, or what it raised."""
        self._begun = False
        self._over = ""
        """Why `get` raised; what else comes of the calls would be taken for another's."""

    def put(self, call: Callable[[], Any]) -> None:
        """Have `call` called once those before it have returned; does not wait."""
        if not self._begun:
            threading.Thread(
                target=_call_all, args=(self._calls, self._heard), name=self._name, daemon=True
            ).start()
            self._begun = True
        self._calls.put(call)

    def get(self) -> Any:
        """What the oldest call returned whose end nobody has heard of; waits for it. Once this raised, it always does.

        Raises:
            RuntimeError: it is lost, or `leave` was called.
            Exception: what the call raised.
        """
        lost = False
        while not self._over:
            try:
                value, error = self._heard.get(timeout=LOOK_S)
            except queue.Empty:
                # Twice: it may have come just before.
                if lost:
                    self._over = "a connection to another rank is broken"
                lost = self._lost()
                continue
            if error is None:
                return value
            self._over = str(error) or repr(error)
            try:
                raise error
            finally:
                # Else the error would keep this frame, and all that it knows, which keeps the error.
                del error
        raise RuntimeError(self._over)

    def leave(self) -> None:
        """Have `get` raise once it has told what has ended, and the thread end once it is free; from any thread."""
        self._calls.put(None)
        self._heard.put((None, RuntimeError("the channel is closed")))


def _call_all(
    calls: queue.SimpleQueue[Callable[[], Any] | None],
    heard: queue.SimpleQueue[tuple[Any, BaseException | None]],
) -> None:
    while (call := calls.get()) is not None:
        try:
            heard.put((call(), None))
        except BaseException as error:
            # Without the frames, which would keep all that they know alive where nobody asks.
            heard.put((None, error.with_traceback(None)))
        del call
