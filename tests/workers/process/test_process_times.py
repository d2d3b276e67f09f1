"""A process as another one of its machine sees it: real processes, and a system that tells less."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pace import patient

from workers.process.process_times import CHAIN, ProcessTimes, Standing, process_times, starved_s

pytestmark = pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="Linux alone tells waits")

SPIN = "while True: pass"
SLEEP = "import time; time.sleep(600)"


@pytest.fixture
def start() -> Iterator[Callable[..., int]]:
    """Starts a Python program, pinned to one core if asked; ends it after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(program: str, core: int | None = None) -> int:
        pin = f"import os; os.sched_setaffinity(0, {{{core}}})\n" if core is not None else ""
        started.append(subprocess.Popen([sys.executable, "-I", "-S", "-c", pin + program]))
        return started[-1].pid

    yield begin
    for process in started:
        process.kill()
        process.wait()


def until(pid: int, seen: Callable[[ProcessTimes], bool]) -> ProcessTimes:
    deadline_s = time.monotonic() + patient(60)
    while not seen(times := process_times(pid)):
        assert time.monotonic() < deadline_s, times
        time.sleep(0.01)
    return times


def test_what_a_process_does(start: Callable[..., int]) -> None:
    sleeps, runs = start(SLEEP), start(SPIN)
    until(sleeps, lambda times: times.standing is Standing.SLEEPING)
    assert until(runs, lambda times: times.ran_s > 0.05).standing is Standing.RUNNABLE
    os.kill(runs, signal.SIGSTOP)
    until(runs, lambda times: times.standing is Standing.STOPPED)
    os.kill(runs, signal.SIGKILL)
    until(runs, lambda times: times.standing is Standing.GONE)


def test_processes_that_share_a_core_wait_for_it_and_one_that_sleeps_does_not(
    start: Callable[..., int],
) -> None:
    core = min(os.sched_getaffinity(0))
    runs = [start(SPIN, core) for _ in range(3)]
    sleeps = start(SLEEP, core)
    for pid in runs:
        until(pid, lambda times: times.ran_s > 0.05)
    until(sleeps, lambda times: times.standing is Standing.SLEEPING)
    before, asleep = [process_times(pid) for pid in runs], process_times(sleeps)
    # At least two of three wait at each moment, whatever else the machine does.
    until(runs[0], lambda times: times.at_s - before[0].at_s > 0.5)
    starved = [starved_s(first, process_times(pid)) for pid, first in zip(runs, before, strict=True)]
    assert sum(waited_s or 0.0 for waited_s in starved) > 0.8
    assert starved_s(asleep, process_times(sleeps)) == 0.0


def test_the_threads_that_waited_longest_tell_and_new_ones_count() -> None:
    before = ProcessTimes(standing=Standing.RUNNABLE, at_s=10.0, waits_s={1: 5.0, 2: 1.0, 3: 1.0, 4: 1.0})
    after = ProcessTimes(standing=Standing.RUNNABLE, at_s=20.0, waits_s={1: 7.0, 3: 1.5, 4: 1.1, 9: 1.0})
    assert CHAIN == 3
    assert starved_s(before, after) == pytest.approx(2.0 + 1.0 + 0.5)
    crowded = ProcessTimes(standing=Standing.RUNNABLE, at_s=11.0, waits_s={1: 6.0, 2: 2.0, 3: 2.0})
    assert starved_s(before, crowded) == 1.0
    assert starved_s(before, ProcessTimes(standing=Standing.GONE, at_s=20.0)) is None


def test_a_system_without_schedstat_tells_state_and_processor_time(
    start: Callable[..., int], tmp_path: Path
) -> None:
    pid = start(SPIN)
    until(pid, lambda times: times.ran_s > 0.05)
    times = process_times(pid, tmp_path)
    assert (times.standing, times.waits_s, times.pressure_s) == (Standing.RUNNABLE, {}, None)
    assert times.ran_s > 0
    assert process_times(2**22 + 1, tmp_path).standing is Standing.GONE
