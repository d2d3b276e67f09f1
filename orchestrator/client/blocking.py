"""Runs one coroutine for code without an event loop, or on an event loop that must not be re-entered."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Call(Generic[T]):
    """A running coroutine, with its own event loop and thread."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._outcome: Future[T] = Future()
        self._running: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = Future()
        threading.Thread(target=self._run, args=(work,), name="job client", daemon=True).start()

    def result(self, timeout_s: float | None = None) -> T:
        """Return or raise what the coroutine did.

        Raises:
            TimeoutError: it still runs after `timeout_s`.
        """
        return self._outcome.result(timeout_s)

    def done(self) -> bool:
        """Whether it has ended."""
        return self._outcome.done()

    def cancel(self) -> None:
        """Cancel it, without waiting for its end."""
        if self.done():
            return
        loop, task = self._running.result()
        with suppress(RuntimeError):  # it has just ended, with its loop
            loop.call_soon_threadsafe(task.cancel)

    def _run(self, work: Coroutine[Any, Any, T]) -> None:
        try:
            self._outcome.set_result(asyncio.run(self._announced(work)))
        except BaseException as error:
            self._outcome.set_exception(error)

    async def _announced(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._running.set_result((asyncio.get_running_loop(), task))
        return await work


def finish(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` and return its result; an interrupted wait cancels it."""
    call = Call(work)
    try:
        return call.result()
    except BaseException:
        call.cancel()
        raise
