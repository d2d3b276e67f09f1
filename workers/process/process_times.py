"""A process as its operating system sees it: whether it could run, whether it did, and how long it waited for a core.

Any process of the same machine may look. Linux tells all of it, other systems less. Decides nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import psutil

CHAIN = 3
"""Threads of a rank through which an answer passes, one after the other: the one that receives calls, the one that
answers, and the one that trains and has the interpreter. Many others of an idle process wake now and then; what they
wait for a core does not keep the process from anything."""


class Standing(StrEnum):
    """State of a process, from the states of its threads."""

    RUNNABLE = "runnable"
    """At least one runs, or could."""
    BLOCKED = "blocked"
    """None could run, and at least one waits for a disk or for memory to be read back."""
    SLEEPING = "sleeping"
    """All wait for something that other threads, processes or a clock must bring."""
    STOPPED = "stopped"
    """By SIGSTOP or a debugger."""
    GONE = "gone"
    """There is no such process, or nothing but its exit code is left of it."""


@dataclass(frozen=True, kw_only=True)
class ProcessTimes:
    """One look at a process. Its times only grow."""

    standing: Standing
    at_s: float
    """When, by the monotonic clock of its machine."""
    ran_s: float = 0.0
    """Processor time of all its threads."""
    waits_s: Mapping[int, float] = field(default_factory=dict)
    """Thread -> how long it could have run and waited for a core; empty: this system does not tell."""
    pressure_s: float | None = None
    """Time in which at least one process of the machine, or of the container, waited for a core; None: unknown."""


def process_times(pid: int, proc: Path = Path("/proc")) -> ProcessTimes:
    """Look at the process `pid` of this machine.

    Args:
        proc: where the kernel's files lie.
    """
    now_s = time.monotonic()
    if not (proc / "self" / "schedstat").exists():
        return _by_psutil(pid, now_s)
    threads = list(_threads(f"{proc}/{pid}/task"))
    return ProcessTimes(
        standing=_standing([state for _, state, _, _ in threads]),
        at_s=now_s,
        ran_s=sum(ran_s for _, _, ran_s, _ in threads),
        waits_s={thread: waited_s for thread, _, _, waited_s in threads},
        pressure_s=_pressure_s(proc),
    )


def _threads(folder: str) -> Iterator[tuple[int, str, float, float]]:
    """The threads, each with its state, and the seconds that it ran and waited for a core."""
    try:
        threads = os.listdir(folder)
    except OSError:
        return
    for thread in threads:
        try:
            # The name in parentheses may hold spaces and parentheses.
            state = Path(folder, thread, "stat").read_text().rpartition(")")[2].split()[0]
            ran, waited, _ = Path(folder, thread, "schedstat").read_text().split()
        except (OSError, IndexError, ValueError):  # it has ended
            continue
        yield int(thread), state, int(ran) / 1e9, int(waited) / 1e9


def starved_s(before: ProcessTimes, after: ProcessTimes) -> float | None:
    """Return how long, between two looks, the threads that waited longest for a core did so; None: unknown."""
    if not before.waits_s or not after.waits_s:
        return None
    waits = sorted(waited_s - before.waits_s.get(thread, 0.0) for thread, waited_s in after.waits_s.items())
    return min(after.at_s - before.at_s, sum(waits[-CHAIN:]))


def _standing(states: list[str]) -> Standing:
    """State of a process whose threads have these states, as letters of proc(5)."""
    alive = {state for state in states if state not in "ZX"}
    if not alive:
        return Standing.GONE
    if alive & {"T", "t"}:
        return Standing.STOPPED
    if "R" in alive:
        return Standing.RUNNABLE
    return Standing.BLOCKED if "D" in alive else Standing.SLEEPING


def _pressure_s(proc: Path) -> float | None:
    try:
        some = (proc / "pressure" / "cpu").read_text().splitlines()[0]
        return int(some.rsplit("total=", 1)[1]) / 1e6
    except (OSError, IndexError, ValueError):
        return None


def _by_psutil(pid: int, now_s: float) -> ProcessTimes:
    try:
        process = psutil.Process(pid)
        times, status = process.cpu_times(), process.status()
    except psutil.Error:
        return ProcessTimes(standing=Standing.GONE, at_s=now_s)
    standing = {
        psutil.STATUS_RUNNING: Standing.RUNNABLE,
        psutil.STATUS_WAKING: Standing.RUNNABLE,
        psutil.STATUS_DISK_SLEEP: Standing.BLOCKED,
        psutil.STATUS_STOPPED: Standing.STOPPED,
        psutil.STATUS_TRACING_STOP: Standing.STOPPED,
        psutil.STATUS_ZOMBIE: Standing.GONE,
        psutil.STATUS_DEAD: Standing.GONE,
    }.get(status, Standing.SLEEPING)
    return ProcessTimes(standing=standing, at_s=now_s, ran_s=times.user + times.system)
