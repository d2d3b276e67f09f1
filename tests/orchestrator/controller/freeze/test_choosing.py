"""When a job that chooses how to freeze does so, and by which gradients. Pure."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lifecycle_jobs import SOLUTION, step_report
from synthetic_run import plan as pipeline_plan

from orchestrator.controller.freeze.method_choice import EVERY, due
from orchestrator.events import types as events
from orchestrator.history.job_view import JobView, fold
from planner.freezing import FreezeOverrides, FreezePlan, Phases
from workers.config import FreezeConfig
from workers.protocol.reports import FreezeStarted, TimelineReport

PHASES = Phases(warm_up=2, monitoring=6, ramp=8)
SOLVED = FreezePlan(epoch=1, version=1, ratios=((0.5,),) * 3, start=9)
ITSELF = FreezeOverrides(method="prefix", r_max="auto", prefix=2, chosen=True)
AGAIN = FreezeOverrides(method="auto", r_max="auto", phases=PHASES, since=1, solved=True, chosen=True)
SOMEONE = FreezeOverrides(method="prefix", r_max="auto", prefix=2)
ASKED = FreezeOverrides(method="auto", r_max="auto", phases=PHASES, since=20)


def view_of(*log: events.Event, **freeze: object) -> JobView:
    begun = events.Submitted(job="j", epoch=1, spec={"freeze": freeze}, resume=False)
    issued = events.Issued(plan=pipeline_plan())
    return fold(events.Record(time_s=0.0, event=event) for event in (begun, issued, *log))


@pytest.mark.parametrize(
    ("method", "control", "at_once", "later"),
    [
        ("auto", None, True, True),
        ("timelyfreeze", None, False, False),
        ("auto", ITSELF, False, True),
        ("auto", AGAIN, False, True),
        ("auto", SOMEONE, False, False),
        ("timelyfreeze", ASKED, False, False),
        ("timelyfreeze", replace(ASKED, solved=True), True, True),
    ],
    ids=[
        "solved",
        "another method",
        "chose a prefix",
        "chose the program again",
        "someone chose",
        "monitors for it",
        "someone asked for it",
    ],
)
def test_a_job_chooses_once_its_program_is_solved_and_now_and_again(
    method: str, control: FreezeOverrides | None, at_once: bool, later: bool
) -> None:
    spec = FreezeConfig(method=method, warm_up=2, monitoring=6, ramp=8)  # pyright: ignore[reportArgumentType]
    plan = replace(SOLVED, control=control)
    view = view_of(FreezeStarted(plan=plan), **spec.model_dump())
    assert due(FreezeStarted(plan=plan), spec, view) == at_once
    steps = [step for step in range(1, 9 + 3 * EVERY) if due(step_report(step), spec, view)]
    assert steps == ([9 + turn * EVERY - 1 for turn in (1, 2, 3)] if later else [])


def test_layers_count_by_the_newest_steps_that_told_and_frozen_ones_as_before() -> None:
    def told(step: int, *energies: float) -> TimelineReport:
        return TimelineReport(step=step, rank=0, step_s=1.0, spans=(), memory_bytes=0, energies=energies)

    def energies(*log: events.Event) -> tuple[float, ...]:
        return view_of(*log, method="auto").freeze.energies

    assert energies(told(1, 3.0, 3.0, 3.0)) == ()
    begun = (replace(SOLUTION, plan=SOLVED, energies=(8.0, 4.0, 2.0)), FreezeStarted(plan=SOLVED))
    assert energies(*begun) == (8.0, 4.0, 2.0)
    assert energies(*begun, told(11, 2.0, 4.0, 5.0)) == (6.0, 4.0, 3.0)
    small = [told(20 * number, 0.01, 4.0, 2.0) for number in range(1, 60)]
    frozen = [told(2000 + 20 * number, 0.0, 4.0, 2.0) for number in range(60)]
    other = told(10_000)
    assert energies(*begun, *small, *frozen, other) == (pytest.approx(0.01, rel=0.01), 4.0, 2.0)
