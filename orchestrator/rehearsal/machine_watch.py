"""Watches what else runs on this machine while a job is rehearsed: other work disturbs it as a neighbour does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean

import psutil

from orchestrator.analysis.interference_time import DISTURBED
from orchestrator.quantities import percent

EVERY_S = 2.0
"""Between two looks."""
TOLD_AFTER = 5
"""Looks whose mean is told."""


@dataclass(frozen=True, kw_only=True)
class ProcessorTimes:
    """The processors at one moment."""

    time_s: float
    """Time of a monotonic clock."""
    cores: int
    busy_s: float
    """Busy time of all cores together, so far."""
    own_s: Mapping[tuple[int, float], float]
    """(id, start) of each process of the rehearsal -> what it has taken so far."""


def look() -> ProcessorTimes:
    """Look at this machine, and at this process with all its descendants."""
    cores = psutil.cpu_times(percpu=True)
    busy = sum(sum(core[:8]) - core.idle - getattr(core, "iowait", 0.0) for core in cores)
    own: dict[tuple[int, float], float] = {}
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.Error):  # it has ended
            times = process.cpu_times()
            own[process.pid, process.create_time()] = times.user + times.system
    return ProcessorTimes(time_s=time.monotonic(), cores=len(cores), busy_s=busy, own_s=own)


def others(before: ProcessorTimes, after: ProcessorTimes) -> float:
    """The share of the processors that other work took between two looks, in [0, 1]. A process of the rehearsal that
    began in between counts as a whole, one that ended not at all."""
    passed_s = (after.time_s - before.time_s) * after.cores
    if passed_s <= 0:
        return 0.0
    own_s = sum(taken_s - before.own_s.get(process, 0.0) for process, taken_s in after.own_s.items())
    return min(1.0, max(0.0, (after.busy_s - before.busy_s - own_s) / passed_s))


class MachineWatch:
    """Looks now and then until it is closed, and says once if other work takes much.

    Args:
        say: takes that, in words.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        *,
        look: Callable[[], ProcessorTimes] = look,
        every_s: float = EVERY_S,
    ) -> None:
        self._say = say
        self._look = look
        self._every_s = every_s
        self._shares: list[float] = []
        self._told = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="machine watch", daemon=True)
        self._thread.start()

    def close(self) -> float:
        """End; return the share of the processors that other work took on average."""
        self._closing.set()
        self._thread.join()
        return fmean(self._shares) if self._shares else 0.0

    def _run(self) -> None:
        before = self._look()
        while not self._closing.wait(self._every_s):
            after = self._look()
            self._shares.append(others(before, after))
            before = after
            newest = self._shares[-TOLD_AFTER:]
            if not self._told and len(newest) == TOLD_AFTER and fmean(newest) > DISTURBED:
                self._told = True
                self._say(
                    f"this machine is disturbed: other work takes {percent(fmean(newest))} of its processors, and slows"
                    " ranks down as the neighbour does; the numbers will not be the neighbour's alone"
                )
