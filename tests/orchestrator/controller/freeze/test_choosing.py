"""When a job that chooses how to freeze does so, by which gradients and for which layout. Pure."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from lifecycle_jobs import SOLUTION, step_report
from made_profile import made_profile
from small_profile import plan as cut
from synthetic_run import plan as pipeline_plan

from orchestrator.controller.freeze.method_choice import EVERY, chosen, due
from orchestrator.controller.requests.freeze_request import Running
from orchestrator.events import types as events
from orchestrator.history.job_view import JobView, fold
from planner.freezing import FreezeOverrides, FreezePlan, Phases
from planner.schedule.registry import build
from planner.search.replan import Replanner
from planner.simulation.predict import predict
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


@pytest.mark.parametrize("pack", ["planner", "off"])
def test_a_prefix_is_weighed_with_the_layers_where_they_would_be(pack: str) -> None:
    """Equal layers on two ranks, of which the first has those with small gradients: frozen, they save up to a third of
    the step once the ranks share the others, and little where the second rank keeps all it has."""
    layers, plan, schedule = 8, cut(4, 4, microbatches=8), build("1f1b", 2, 8)
    profile = made_profile([f"l{number}" for number in range(layers)], [1000] * layers, 2)
    begun = replace(SOLUTION, plan=SOLVED, energies=(*(0.001,) * 4, *(1.0,) * 4))
    program = replace(SOLVED, ratios=((0.0,) * 8,) * layers)
    spec = FreezeConfig(method="auto", warm_up=2, monitoring=6, ramp=8, pack=pack)  # pyright: ignore[reportArgumentType]
    job = Running(
        spec=spec,
        adaptive=False,
        view=view_of(begun, FreezeStarted(plan=program), **spec.model_dump()),
        plan=plan,
        schedule=schedule,
        coming=plan,
        profile=profile,
        replanner=Replanner(
            first=plan, schedule=schedule, parameters=(1000,) * layers, copies=0, profile=profile
        ),
        domains=("a", "a"),
        replayed=False,
    )
    best = chosen(job)
    assert best is not None
    assert best.prefix == 4
    ((_, time),) = re.findall(r"(take) ([0-9.]+) of the time without freezing$", best.reason.split(",")[0])
    unfrozen_s = predict(profile, plan, schedule).step_s
    as_is_s = predict(profile.with_prefix(4), plan, schedule).step_s
    if pack == "off":
        assert float(time) == pytest.approx(as_is_s / unfrozen_s, abs=0.01)
    else:
        assert 2 / 3 < float(time) < 0.95 * as_is_s / unfrozen_s
