"""Reads how long each thread of this process ran, and how long it could have run but waited for a core. Linux alone
tells this."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

ALL_EVERY_S = 2.0
"""Between two looks at all threads: a rank may have fifty, and a look at one costs some microseconds."""
WATCHED = 4
"""Threads that are looked at each time: those that were busiest between the last two looks at all."""

Times = Mapping[int, tuple[float, float]]
"""Thread -> seconds that it ran, and seconds that it waited for a core, so far."""


class ThreadWaits:
    """Reads the times of the threads that matter.

    Args:
        proc: where the kernel's files lie.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._folder = str(proc / "self" / "task")
        self._watched: tuple[int, ...] = ()
        self._all: dict[int, tuple[float, float]] = {}
        self._all_at_s = -ALL_EVERY_S

    def read(self) -> Times:
        """The times of the busiest threads; now and then of all.

        Raises:
            OSError: this system does not tell them.
        """
        now_s = time.monotonic()
        if now_s - self._all_at_s < ALL_EVERY_S:
            return self._times(self._watched)
        found = self._times(map(int, os.listdir(self._folder)))
        busy = {
            thread: sum(times) - sum(self._all.get(thread, (0.0, 0.0))) for thread, times in found.items()
        }
        self._watched = tuple(sorted(busy, key=lambda thread: -busy[thread])[:WATCHED])
        self._all, self._all_at_s = found, now_s
        return found

    def _times(self, threads: Iterable[int]) -> dict[int, tuple[float, float]]:
        found: dict[int, tuple[float, float]] = {}
        for thread in threads:
            try:
                file = os.open(f"{self._folder}/{thread}/schedstat", os.O_RDONLY)
            except FileNotFoundError:  # it has ended
                continue
            try:
                ran, waited, _ = os.read(file, 64).split()
            finally:
                os.close(file)
            found[thread] = int(ran) / 1e9, int(waited) / 1e9
        return found
