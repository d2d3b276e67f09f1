"""Runs one coroutine for code that has no event loop, or that runs on one that must not be entered again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Call(Generic[T]):
    """A coroutine under way, on an event loop and in a thread of its own."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._outcome: Future[T] = Future()
        self._running: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = Future()
        threading.Thread(target=self._run, args=(work,), name="job client", daemon=True).start()

    def result(self, timeout_s: float | None = None) -> T:
        """What the coroutine returned or raised.

        Raises:
            TimeoutError: it is still under way after `timeout_s`.
        """
        return self._outcome.result(timeout_s)

    def done(self) -> bool:
        """Whether it has ended."""
        return self._outcome.done()

    def cancel(self) -> None:
        """Have it end, without waiting for that."""
        if self.done():
            return
        loop, task = self._running.result()
        with suppress(RuntimeError):  # it ended just now, and its loop with it
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
    """What `work` returns; an interrupted wait cancels it."""
    call = Call(work)
    try:
        return call.result()
    except BaseException:
        call.cancel()
        raise
