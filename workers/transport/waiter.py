"""A thread for calls that nothing can interrupt, so that the thread that needs their results can be woken.

When a connection breaks, Gloo wakes all calls waiting in it, except one that waits for a partly transferred
message: that call waits until the group's timeout, whatever is closed in the meantime.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

LOOK_S = 0.1
"""Seconds between two checks whether the result can still arrive."""


class Waiter:
    """Runs calls one after the other on a thread of its own. One thread uses it; any may `leave`.

    Args:
        lost: whether the calls wait in vain, without raising.
    """

    def __init__(self, name: str, lost: Callable[[], bool] = lambda: False) -> None:
        self._name = name
        self._lost = lost
        self._calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        """The result of each call: its value, or what it raised."""
        self._begun = False
        self._over = ""
        """Why `get` raised. Later results would be mistaken for those of other calls."""

    def put(self, call: Callable[[], Any]) -> None:
        """Queue `call` behind the earlier ones; does not wait."""
        if not self._begun:
            threading.Thread(
                target=_call_all, args=(self._calls, self._results), name=self._name, daemon=True
            ).start()
            self._begun = True
        self._calls.put(call)

    def get(self) -> Any:
        """Wait for the oldest result that was not yet taken, and return it. Once it raised, it always does.

        Raises:
            RuntimeError: the result is lost, or `leave` was called.
            Exception: what the call raised.
        """
        lost = False
        while not self._over:
            try:
                value, error = self._results.get(timeout=LOOK_S)
            except queue.Empty:
                # Look twice: the result may have arrived just before the first check.
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
                # Otherwise the error would keep this frame and its locals alive, which keep the error alive.
                del error
        raise RuntimeError(self._over)

    def leave(self) -> None:
        """Make `get` raise once it has returned the results at hand, and end the thread once it is free. Call
        it from any thread."""
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
            # Without the frames, which would keep their locals alive if nobody takes the result.
            results.put((None, error.with_traceback(None)))
        del call
