"""A thread that waits in calls which nothing can interrupt, so that a thread that needs their results can be woken.

When a connection breaks, Gloo wakes all calls that wait in it, except one that waits for a partly transferred message:
that call waits until the group's timeout, whatever is closed meanwhile.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

LOOK_S = 0.1
"""Seconds between two checks whether the result can still come."""


class Waiter:
    """Calls one after the other, on a thread that begins with the first of them. One thread asks, any may leave.

    Args:
        lost: whether the calls wait in vain, though they do not raise.
    """

    def __init__(self, name: str, lost: Callable[[], bool] = lambda: False) -> None:
        self._name = name
        self._lost = lost
        self._calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        """What came of each call: its value, or what it raised."""
        self._begun = False
        self._over = ""
        """Why `get` raised; what else comes of the calls would be taken for another's."""

    def put(self, call: Callable[[], Any]) -> None:
        """Have `call` called once those before it have returned; does not wait."""
        if not self._begun:
            threading.Thread(
                target=_call_all, args=(self._calls, self._results), name=self._name, daemon=True
            ).start()
            self._begun = True
        self._calls.put(call)

    def get(self) -> Any:
        """Wait for the oldest call whose result was not yet taken, and return it. Once this raised, it always does.

        Raises:
            RuntimeError: the result is lost, or `leave` was called.
            Exception: what the call raised.
        """
        lost = False
        while not self._over:
            try:
                value, error = self._results.get(timeout=LOOK_S)
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
        """Make `get` raise after the results it has, and the thread end once it is free. Call from any thread."""
        self._calls.put(None)
        self._results.put((None, RuntimeError("the channel is closed")))


def _call_all(
    calls: queue.SimpleQueue[Callable[[], Any] | None],
    results: queue.SimpleQueue[tuple[Any, BaseException | None]],
) -> None:
    while (call := calls.get()) is not None:
        try:
            results.put((call(), None))
        except BaseException as error:
            # Without the frames, which would keep all that they know alive where nobody asks.
            results.put((None, error.with_traceback(None)))
        del call
