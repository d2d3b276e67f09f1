"""The threads in which routes compute. Reads have their own: none waits for a simulation or for a past run's log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

READERS = 8
FILE_READERS = 2
"""Few: a past run's log takes seconds of a core to read."""
SIMULATORS = 2
"""Few: a simulation takes seconds of a core, and what else runs here takes turns with it."""

T = TypeVar("T")


class Threads:
    """Close it on the loop that used it."""

    def __init__(self) -> None:
        self._readers = ThreadPoolExecutor(READERS, "read")
        self._file_readers = ThreadPoolExecutor(FILE_READERS, "past run")
        self._simulators = ThreadPoolExecutor(SIMULATORS, "simulation")

    async def read(self, work: Callable[[], T]) -> T:
        """What `work` returns, which takes milliseconds."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, work)

    async def read_files(self, work: Callable[[], T]) -> T:
        """What `work` returns, which reads files of past runs and may take seconds."""
        return await asyncio.get_running_loop().run_in_executor(self._file_readers, work)

    async def simulate(self, work: Callable[[], T]) -> T:
        """What `work` returns, which may take seconds."""
        return await asyncio.get_running_loop().run_in_executor(self._simulators, work)

    def close(self) -> None:
        """Begin nothing more."""
        for pool in (self._readers, self._file_readers, self._simulators):
            pool.shutdown(wait=False, cancel_futures=True)
