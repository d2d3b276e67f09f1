"""Reads the counters of the host and of this process: CPU, memory, disk, network, pressure. Linux tells all of them;
what another system does not tell is missing."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from workers.sampling.readings import Reading

CLOCK_EVERY_S = 2.0
"""Between two looks at the cores' clocks: one costs more than all the rest."""


class HostReader:
    """Reads the host.

    Args:
        proc: where the kernel's files lie.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._cores = psutil.cpu_count() or 1
        self._clock: float | None = None
        self._clock_at_s = -CLOCK_EVERY_S
        self._sources: tuple[Callable[[dict[str, float], dict[str, float]], None], ...] = (
            self._process,
            self._cpu,
            self._memory,
            self._disks,
            self._network,
            self._pressure,
        )

    def read(self) -> Reading:
        """Look once. A source that fails is missing."""
        now_s = time.monotonic()
        values: dict[str, float] = {}
        totals: dict[str, float] = {}
        for source in self._sources:
            try:
                source(values, totals)
            except (OSError, RuntimeError, AttributeError, ValueError, NotImplementedError):
                continue
        times = psutil.cpu_times(percpu=True)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return Reading(
            time_s=now_s,
            values=values,
            totals=totals,
            cores_s=tuple(
                sum(core) - core.idle - getattr(core, "iowait", 0.0) - _guests(core) for core in times
            ),
            own_s=usage.ru_utime + usage.ru_stime,
        )

    def _process(self, values: dict[str, float], totals: dict[str, float]) -> None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        totals["own_switches"] = usage.ru_nivcsw
        totals["own_faults"] = usage.ru_minflt
        totals["major_faults"] = usage.ru_majflt

    def _cpu(self, values: dict[str, float], totals: dict[str, float]) -> None:
        totals["switches"] = psutil.cpu_stats().ctx_switches
        times = psutil.cpu_times()
        totals["cpu_stolen"] = times.steal / self._cores
        totals["cpu_waiting_for_disk"] = times.iowait / self._cores
        running = (self._proc / "loadavg").read_text().split()[3].split("/")[0]
        values["cpu_runnable"] = int(running) / self._cores
        now_s = time.monotonic()
        if now_s - self._clock_at_s >= CLOCK_EVERY_S:
            self._clock_at_s, self._clock = now_s, _clock()
        if self._clock is not None:
            values["cpu_clock"] = self._clock

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


def _guests(core: Any) -> float:
    """Seconds that are counted twice: as a guest's and as the host's."""
    return getattr(core, "guest", 0.0) + getattr(core, "guest_nice", 0.0)


def _clock() -> float | None:
    frequency = psutil.cpu_freq()
    if frequency is None or not frequency.max or not frequency.current:
        return None
    return frequency.current / frequency.max
