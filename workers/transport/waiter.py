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

_LEFT = RuntimeError("the channel is closed")


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

    def put(self, call: Callable[[], Any]) -> None:
        """Have `call` called once those before it have returned; does not wait."""
        if not self._begun:
            self._begun = True
            threading.Thread(
                target=_call_all, args=(self._calls, self._heard), name=self._name, daemon=True
            ).start()
        self._calls.put(call)

    def get(self) -> Any:
        """What the oldest call returned whose end nobody has heard of; waits for it.

        Raises:
            RuntimeError: it is lost, or `leave` was called.
            Exception: what the call raised.
        """
        lost = False
        while True:
            try:
                value, error = self._heard.get(timeout=LOOK_S)
            except queue.Empty:
                if lost:
                    raise RuntimeError("a connection to another rank is broken") from None
                # Once more: it may have come just before.
                lost = self._lost()
                continue
            if error is _LEFT:
                # For who asks again.
                self._heard.put((None, _LEFT))
                raise RuntimeError(*_LEFT.args)
            if error is not None:
                raise error
            return value

    def leave(self) -> None:
        """Have `get` raise once it has told what has ended, and the thread end once it is free; from any thread."""
        self._calls.put(None)
        self._heard.put((None, _LEFT))


def _call_all(
    calls: queue.SimpleQueue[Callable[[], Any] | None],
    heard: queue.SimpleQueue[tuple[Any, BaseException | None]],
) -> None:
    while (call := calls.get()) is not None:
        try:
            heard.put((call(), None))
        except BaseException as error:
            heard.put((None, error))
        del call
