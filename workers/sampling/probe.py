"""Times small fixed pieces of work on the rank's core: contention for memory and caches shows in no counter that a
virtual machine passes on, but in how long a read takes.

CPU time of the thread is measured: how long it waited for a core does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import fmean

import numpy as np

from workers.sampling.readings import Reading

MEMORY_BYTES = 1 << 25
"""What is read lies in a block of this size: as large as the last cache, and read so seldom that little of it is there."""
STREAMED_BYTES = 1 << 18
READS = 512
ARITHMETIC = 2048
"""Sines of a piece of arithmetic."""


class Probe:
    """Times each piece once per `run`; a reading tells the means since the last one."""

    def __init__(self) -> None:
        self._values = np.ones(MEMORY_BYTES // 4, dtype=np.float32)
        self._places = np.random.default_rng(0).integers(0, len(self._values), size=READS)
        self._angles = np.linspace(0.0, 1.0, ARITHMETIC)
        self._sines = np.empty_like(self._angles)
        self._streamed = 0
        self._pieces: dict[str, Callable[[], object]] = {
            "core_time": self._arithmetic,
            "stream_time": self._stream,
            "random_time": self._random,
        }
        self._times_s: dict[str, list[float]] = {name: [] for name in self._pieces}

    def run(self) -> None:
        """Time each piece once; takes less than half a millisecond of CPU."""
        for name, piece in self._pieces.items():
            begun = time.thread_time_ns()
            piece()
            self._times_s[name].append((time.thread_time_ns() - begun) / 1e9)

    def read(self) -> Reading:
        """The mean CPU time of each piece since the last reading; missing if none was run."""
        found = {name: fmean(times_s) for name, times_s in self._times_s.items() if times_s}
        for times_s in self._times_s.values():
            times_s.clear()
        return Reading(time_s=time.monotonic(), values=found)

    def _arithmetic(self) -> None:
        np.sin(self._angles, out=self._sines)

    def _stream(self) -> None:
        count = STREAMED_BYTES // 4
        self._values[self._streamed : self._streamed + count].max()
        self._streamed = (self._streamed + count) % len(self._values)

    def _random(self) -> None:
        self._places = (self._places * 5 + 1) % len(self._values)
        self._values.take(self._places)
