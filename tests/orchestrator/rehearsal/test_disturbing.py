"""What disturbs a job: it comes and goes with the job's steps, says when it was there, and leaves nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest
from pace import patient

from orchestrator.events.rehearsed import DisturbedSteps
from orchestrator.events.types import Event, Finished, Record
from orchestrator.rehearsal.disturbing import (
    ComingNeighbour,
    Disturber,
    InjectedSlowdown,
    Interference,
    visits_of,
)
from workers.fault_injection.fault import Fault
from workers.fault_injection.kinds import FaultKind
from workers.interference.neighbours import beside
from workers.process.cores import core_of
from workers.protocol.errors import JobError
from workers.protocol.reports import FaultReport, StepReport

VISITS = (DisturbedSteps(first=3, last=4), DisturbedSteps(first=8, last=9))
PLAN = Interference(level="heavy", kind="compute", rank=1, visits=VISITS)
END = Finished(step=10, stopped=False, state_sha256="")


def step(number: int) -> StepReport:
    return StepReport(
        generation=1,
        step=number,
        loss=1.0,
        grad_norm=1.0,
        lr=0.1,
        samples=1,
        tokens=1,
        step_s=0.1,
        bubble=0.0,
        skipped=False,
    )


def pass_in(disturber: Disturber, *events: Event) -> None:
    for event in events:
        disturber.observe(Record(time_s=0.0, event=event))


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + patient(20.0)
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_neighbour_comes_and_goes_with_the_steps_and_ends_with_the_job() -> None:
    there: list[bool] = []

    @contextmanager
    def come() -> Iterator[None]:
        there.append(True)
        try:
            yield
        finally:
            there.append(False)

    neighbour = ComingNeighbour(PLAN, come, "a neighbour", lambda text: None)
    pass_in(neighbour, step(1))
    assert there == []
    pass_in(neighbour, step(2))
    until(lambda: there == [True])
    pass_in(neighbour, step(3))
    assert there == [True]
    pass_in(neighbour, step(4))
    until(lambda: there == [True, False])
    pass_in(neighbour, *map(step, range(5, 9)))
    until(lambda: there == [True, False, True])
    # The job ends while it is there.
    pass_in(neighbour, END)
    neighbour.close()
    assert there == [True, False, True, False]
    done = neighbour.disturbed()
    assert (done.by, done.rank, neighbour.trouble) == ("a neighbour", 1, "")
    # The step under way as it goes was disturbed too; of the second visit the job ended in its first step.
    assert done.visits == (DisturbedSteps(first=3, last=5),)


def test_a_real_neighbour_of_a_job_that_breaks_off_is_gone() -> None:
    core, before = core_of(PLAN.rank), set(psutil.Process().children(recursive=True))
    neighbour = ComingNeighbour(PLAN, lambda: beside("compute", "light", (core,)), "", lambda text: None)
    pass_in(neighbour, step(2))
    until(lambda: bool(set(psutil.Process().children()) - before))
    (process,) = set(psutil.Process().children()) - before
    neighbour.close()
    assert not process.is_running()


def test_a_neighbour_that_cannot_come_is_trouble() -> None:
    @contextmanager
    def come() -> Iterator[None]:
        raise RuntimeError("no room")
        yield

    said: list[str] = []
    neighbour = ComingNeighbour(PLAN, come, "", said.append)
    pass_in(neighbour, step(2))
    until(lambda: bool(said))
    neighbour.close()
    assert (neighbour.trouble, said) == ("no room", ["the neighbour did not come: no room"])
    assert neighbour.disturbed().visits == ()


def test_a_fault_is_armed_for_each_visit_once_the_job_trains() -> None:
    armed: list[tuple[int, Fault]] = []
    slowdown = InjectedSlowdown(PLAN, lambda rank, fault: armed.append((rank, fault)), lambda text: None)
    pass_in(slowdown, step(1), step(2))
    until(lambda: len(armed) == 2)
    assert [(rank, fault.kind, fault.factor, fault.step, fault.steps) for rank, fault in armed] == [
        (1, FaultKind.SLOW, 3.0, 3, 2),
        (1, FaultKind.SLOW, 3.0, 8, 2),
    ]
    # They fire where the rank says so; the second one as the job ends.
    fired = [FaultReport(rank=1, fault="slow", step=at, phase="forward", fired_s=0.0) for at in (4, 10)]
    pass_in(slowdown, *fired, step(10), END)
    slowdown.close()
    assert slowdown.disturbed().visits == (DisturbedSteps(first=4, last=5), DisturbedSteps(first=10, last=10))


def test_visits_are_as_long_as_the_time_between_them() -> None:
    assert visits_of(300, None) == (DisturbedSteps(first=61, last=120), DisturbedSteps(first=181, last=240))
    assert visits_of(304, None) == visits_of(300, None)
    assert visits_of(75, 25) == (DisturbedSteps(first=26, last=50),)
    assert visits_of(40, 25) == (DisturbedSteps(first=26, last=40),)
    for steps, every, said in (
        (49, None, "set at least 50"),
        (100, 5, "lasts at least 10 steps"),
        (100, 100, "the neighbour would never come"),
    ):
        with pytest.raises(JobError, match=said):
            visits_of(steps, every)
