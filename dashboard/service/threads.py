"""The threads in which routes compute. Reads have their own: none waits for a simulation or for a past run's log."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from orchestrator.garbage import collections_held_back, exclude_all_objects

READERS = 8
FILE_READERS = 2
"""Few: a past run's log takes seconds of a core to read."""
SIMULATORS = 2
"""Few: a simulation takes seconds of a core, and what else runs here takes turns with it."""

LONG_S = 0.5
"""A read of files that takes longer has read logs for the first time, whose views are kept."""

T = TypeVar("T")


class Threads:
    """Close it on the loop that used it."""

    def __init__(self) -> None:
        self._readers = ThreadPoolExecutor(READERS, "read")
        self._file_readers = ThreadPoolExecutor(FILE_READERS, "past run")
        self._simulators = ThreadPoolExecutor(SIMULATORS, "simulation")
        self._lock, self._working = threading.Lock(), 0
        self._pools = (self._readers, self._file_readers, self._simulators)

    async def read(self, work: Callable[[], T]) -> T:
        """Run `work`, which takes milliseconds, and return its result."""
        return await self._run(self._readers, work)

    async def read_files(self, work: Callable[[], T]) -> T:
        """Run `work`, which reads files of past runs and may take seconds, and return its result."""
        return await self._run(self._file_readers, partial(_read, work))

    async def simulate(self, work: Callable[[], T]) -> T:
        """Run `work`, which may take seconds, and return its result."""
        return await self._run(self._simulators, work)

    @property
    def busy(self) -> bool:
        """Whether some work is not done yet."""
        return self._working > 0

    async def _run(self, pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        def counted() -> T:
            with self._lock:
                self._working += 1
            try:
                return work()
            finally:
                with self._lock:
                    self._working -= 1

        return await asyncio.get_running_loop().run_in_executor(pool, counted)

    def close(self) -> None:
        """Begin nothing more."""
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)


def _read(work: Callable[[], T]) -> T:
    """`work()`. No collection searches its objects, neither while it makes them nor, if they are many, later: all
    answers would wait for that."""
    begun_s = time.monotonic()
    with collections_held_back():
        result = work()
        if time.monotonic() - begun_s > LONG_S:
            exclude_all_objects()
    return result
