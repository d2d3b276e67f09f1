"""Reads the counters of the host and of this process: CPU, memory, disk, network, pressure. Linux tells all of them;
what another system does not tell is missing."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

from workers.sampling.readings import Reading
from workers.sampling.thread_waits import ThreadWaits, Times

SELDOM_S = 1.0
"""Between two looks at memory, disks, interfaces and clocks: together they cost more than all the rest."""

Source = Callable[[dict[str, float], dict[str, float]], None]
"""Adds what it finds to values and totals."""


class HostReader:
    """Reads the host.

    Args:
        proc: where the kernel's files lie.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._waits = ThreadWaits(proc)
        self._often: tuple[Source, ...] = (self._process, self._running, self._pressure)
        self._seldom: tuple[Source, ...] = (self._memory, self._disks, self._network, self._clock)
        self._seldom_at_s = -SELDOM_S
        self._seldom_totals: dict[str, float] = {}
        self._seldom_values: dict[str, float] = {}

    def read(self) -> Reading:
        """Look once. A source that fails is missing."""
        now_s = time.monotonic()
        values, totals = _found(self._often)
        cores = psutil.cpu_times(percpu=True)
        totals["cpu_stolen"] = sum(getattr(core, "steal", 0.0) for core in cores) / len(cores)
        totals["cpu_waiting_for_disk"] = sum(getattr(core, "iowait", 0.0) for core in cores) / len(cores)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return Reading(
            time_s=now_s,
            values=values | self._now_and_then(now_s),
            totals=totals,
            cores_s=tuple(
                sum(core) - core.idle - getattr(core, "iowait", 0.0) - _guests(core) for core in cores
            ),
            own_s=usage.ru_utime + usage.ru_stime,
            threads=self._threads(),
        )

    def _now_and_then(self, now_s: float) -> dict[str, float]:
        """Costly readings, as of the last look; totals as rates between the last two looks."""
        passed_s = now_s - self._seldom_at_s
        if passed_s >= SELDOM_S:
            values, totals = _found(self._seldom)
            before = self._seldom_totals
            rates = {name: (totals[name] - before[name]) / passed_s for name in totals if name in before}
            self._seldom_values, self._seldom_totals, self._seldom_at_s = values | rates, totals, now_s
        return self._seldom_values

    def _threads(self) -> Times:
        try:
            return self._waits.read()
        except (OSError, ValueError):
            return {}

    def _process(self, values: dict[str, float], totals: dict[str, float]) -> None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        totals["own_switches"] = usage.ru_nivcsw
        totals["own_faults"] = usage.ru_minflt
        totals["major_faults"] = usage.ru_majflt

    def _running(self, values: dict[str, float], totals: dict[str, float]) -> None:
        totals["switches"] = psutil.cpu_stats().ctx_switches
        running = (self._proc / "loadavg").read_text().split()[3].split("/")[0]
        values["cpu_runnable"] = int(running) / (psutil.cpu_count() or 1)

    def _clock(self, values: dict[str, float], totals: dict[str, float]) -> None:
        frequency = psutil.cpu_freq()
        if frequency is not None and frequency.max and frequency.current:
            values["cpu_clock"] = frequency.current / frequency.max

    def _memory(self, values: dict[str, float], totals: dict[str, float]) -> None:
        memory = psutil.virtual_memory()
        values["memory_free"] = memory.available / memory.total

    def _disks(self, values: dict[str, float], totals: dict[str, float]) -> None:
        disks = psutil.disk_io_counters()
        if disks is not None:
            totals["disk_read"], totals["disk_written"] = disks.read_bytes, disks.write_bytes

    def _network(self, values: dict[str, float], totals: dict[str, float]) -> None:
        cards = psutil.net_io_counters(pernic=True)
        loopback = [card for name, card in cards.items() if name == "lo"]
        others = [card for name, card in cards.items() if name != "lo"]
        totals["network_in"] = sum(card.bytes_recv for card in others)
        totals["network_out"] = sum(card.bytes_sent for card in others)
        totals["loopback"] = sum(card.bytes_sent for card in loopback)
        totals["network_errors"] = sum(
            card.errin + card.errout + card.dropin + card.dropout for card in cards.values()
        )

    def _pressure(self, values: dict[str, float], totals: dict[str, float]) -> None:
        for name, feature in (("cpu", "cpu_pressure"), ("memory", "memory_pressure"), ("io", "io_pressure")):
            some = (self._proc / "pressure" / name).read_text().splitlines()[0]
            totals[feature] = int(some.rsplit("total=", 1)[1]) / 1e6


def _found(sources: Iterable[Source]) -> tuple[dict[str, float], dict[str, float]]:
    """Values and totals of the sources that work here."""
    values: dict[str, float] = {}
    totals: dict[str, float] = {}
    for source in sources:
        try:
            source(values, totals)
        except (OSError, RuntimeError, AttributeError, ValueError, NotImplementedError):
            continue
    return values, totals


def _guests(core: Any) -> float:
    """Seconds that are counted twice: as a guest's and as the host's."""
    return getattr(core, "guest", 0.0) + getattr(core, "guest_nice", 0.0)
