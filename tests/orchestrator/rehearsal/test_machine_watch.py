"""Other work on the machine is told apart from the rehearsal's own, and said once."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import count

import pytest

from orchestrator.rehearsal.machine_watch import TOLD_AFTER, MachineWatch, ProcessorTimes, look, others

US, RANK = (1, 0.5), (2, 0.5)


def seen(time_s: float, busy_s: float, own_s: dict[tuple[int, float], float]) -> ProcessorTimes:
    return ProcessorTimes(time_s=time_s, cores=4, busy_s=busy_s, own_s=own_s)


def test_what_the_rehearsal_takes_is_no_other_work() -> None:
    before = seen(10.0, 100.0, {US: 5.0, RANK: 7.0})
    assert others(before, seen(12.0, 106.0, {US: 6.0, RANK: 9.0})) == pytest.approx(3.0 / 8)
    assert others(before, seen(12.0, 103.0, {US: 6.0, RANK: 9.0})) == 0.0
    # A process that began in between; one that ended; clocks that differ by a tick.
    assert others(before, seen(12.0, 104.0, {US: 5.0, RANK: 7.0, (3, 11.0): 2.0})) == pytest.approx(2.0 / 8)
    assert others(before, seen(12.0, 101.0, {US: 6.0})) == 0.0
    assert others(before, seen(12.0, 101.0, {US: 9.0})) == 0.0
    assert others(before, before) == 0.0


def test_descendants_are_the_rehearsals_own() -> None:
    grandchild = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(flush=True); input()'])"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", grandchild], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    child.stdout.readline()
    found = look()
    assert len(found.own_s) >= 3
    assert child.pid in {pid for pid, _ in found.own_s}
    assert found.busy_s > 0
    child.communicate("\n")


def test_a_disturbed_machine_is_told_once_and_its_share_is_kept() -> None:
    moments = count()
    enough = threading.Event()

    def looks() -> Iterator[ProcessorTimes]:
        for number in moments:
            if number > 3 * TOLD_AFTER:
                enough.set()
            # Half of four cores is taken by others.
            yield seen(float(number), 2.0 * number, {US: 0.0})

    said: list[str] = []
    made = looks()
    watch = MachineWatch(said.append, look=lambda: next(made), every_s=0.001)
    assert enough.wait(30)
    assert watch.close() == pytest.approx(0.5)
    (told,) = said
    assert told.startswith("this machine is disturbed: other work takes 50.0 % of its processors")


def test_a_quiet_machine_is_not_spoken_of() -> None:
    moments = count()
    said: list[str] = []
    watch = MachineWatch(said.append, look=lambda: seen(float(next(moments)), 0.0, {US: 0.0}), every_s=0.001)
    while next(moments) < 3 * TOLD_AFTER:
        pass
    assert watch.close() == 0.0
    assert said == []
