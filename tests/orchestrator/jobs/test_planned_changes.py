"""Planned changes of ranks on plain processes: nothing is fetched while the job waits, and the bits stay the same."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from process_hosts import ElasticJob, Ran, assert_gone
from ray_jobs import resolved
from tiny_jobs import tiny

from benchmarks.parts.rank_threads import run_threads
from orchestrator.controller.ranks.next_plans import NextPlans
from orchestrator.events import types as events
from orchestrator.lifecycle.effects import Switch
from orchestrator.lifecycle.states import JobFinished
from orchestrator.lifecycle.stimuli import Going, ScaleRequested
from orchestrator.prepare.settling import Settled
from workers.launch.ranks import LaunchedJob
from workers.protocol.reports import StandbyReport, StepReport, SwitchReport, WarningReport

STEPS = 24
PASS_S = 0.004


def job(folder: Path, pass_s: float = PASS_S, **elastic: Any) -> Settled:
    """Four ranks whose layers nobody else has, unless `elastic` says otherwise."""
    times = {"forward_s": pass_s, "input_grad_s": pass_s, "weight_grad_s": pass_s}
    return resolved(
        tiny(
            folder,
            "job",
            job={"steps": STEPS, "sample_tokens": 0},
            pipeline={"microbatches": 2},
            cluster={"device": "emulated", "emulated": times},
            elastic={"grow": False, "redundancy": "peer", **elastic},
        )
    )


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The state in which the job ends when no rank changes."""
    done = job(tmp_path_factory.mktemp("quiet"))
    return run_threads(LaunchedJob(done.config, done.plan, done.schedule)).state_sha256


def leave_at(step: int, rank: int, left_s: float = 60.0) -> Callable[[ElasticJob, events.Event], None]:
    def take(running: ElasticJob, event: events.Event) -> None:
        if isinstance(event, StepReport) and event.step == step:
            running.post(Going(frozenset({rank}), "file", left_s, f"node{rank}", "h"))

    return take


def check(ran: Ran, expected: str) -> None:
    assert isinstance(ran.state, JobFinished), ran.state
    assert ran.state_sha256 == expected
    assert ran.steps == list(range(1, STEPS + 1))
    assert_gone(ran.pids)


@pytest.mark.parametrize(
    ("redundancy", "rank"),
    [
        pytest.param("peer", 0, marks=pytest.mark.soak),
        pytest.param("peer", 2, marks=pytest.mark.soak),
        pytest.param("checkpoint", 0, marks=pytest.mark.soak),
        ("checkpoint", 2),
    ],
)
def test_a_drain_with_notice_fetches_nothing_while_the_job_waits(
    tmp_path: Path, quiet: str, rank: int, redundancy: str
) -> None:
    ran = ElasticJob(job(tmp_path, redundancy=redundancy), leave_at(3, rank)).run()
    check(ran, quiet)
    (regrouped,) = ran.of(events.Regrouped)
    assert (regrouped.cause, regrouped.lost, regrouped.fetched) == ("drain", (rank,), 0)
    assert (regrouped.rerun, regrouped.steps_lost) == (0, 0)
    first, copying, then = (issued.plan for issued in ran.of(events.Issued))
    assert copying.layers == first.layers
    assert then.pipeline_ranks == 3
    assert {report.version for report in ran.of(SwitchReport)} == {copying.version}
    # The copies of the next generation are there too: it brings none.
    brought = [report.bytes for report in ran.of(StandbyReport) if report.step >= regrouped.step]
    assert not any(brought)


def test_layers_with_copies_in_host_memory_are_built_before_the_ranks_regroup(
    tmp_path: Path, quiet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, switch = list[Switch](), NextPlans.switch

    def noted(plans: NextPlans, effect: Switch) -> Coroutine[Any, Any, None]:
        told.append(effect)
        return switch(plans, effect)

    monkeypatch.setattr(NextPlans, "switch", noted)
    ran = ElasticJob(job(tmp_path, copies_in="host"), leave_at(3, 2)).run()
    check(ran, quiet)
    (regrouped,) = ran.of(events.Regrouped)
    assert (regrouped.cause, regrouped.fetched) == ("drain", 0)
    first, _, then = (issued.plan for issued in ran.of(events.Issued))
    owned = {rank: {*then.pieces_of_place(place)} for place, rank in enumerate((0, 1, 3))}
    taken = {rank: pieces - {*first.pieces_of_place(rank)} for rank, pieces in owned.items()}
    (effect,) = told
    assert {rank: {*pieces} for rank, pieces in effect.building.items()} == {
        rank: pieces for rank, pieces in taken.items() if pieces
    }
    assert ran.of(WarningReport) == []


def test_ranks_whose_change_is_cancelled_train_on_without_its_copies(tmp_path: Path, quiet: str) -> None:
    def scaled(places: int) -> ScaleRequested:
        return ScaleRequested(events.Scaled(ranks=places, spares=0, places=places, id=""))

    def act(running: ElasticJob, event: events.Event) -> None:
        if isinstance(event, StepReport) and event.step == 3:
            running.post(scaled(3))
        if isinstance(event, events.Issued) and "copies for" in event.plan.reason:
            running.post(scaled(4))

    # Long enough for two plans.
    ran = ElasticJob(job(tmp_path, 2 * PASS_S, redundancy="checkpoint"), act).run()
    check(ran, quiet)
    assert ran.of(events.Regrouped) == []
    first, copying, then = (issued.plan for issued in ran.of(events.Issued))
    assert copying.standbys
    assert not then.standbys
    assert then.same_work_as(first)
    switched = ran.of(SwitchReport)
    assert sorted(report.rank for report in switched if report.version == then.version) == [0, 1, 2, 3]
    assert switched[-1].version == then.version


def test_with_a_short_notice_layers_are_fetched_as_before(tmp_path: Path, quiet: str) -> None:
    ran = ElasticJob(job(tmp_path, redundancy="checkpoint"), leave_at(3, 2, left_s=0.5)).run()
    check(ran, quiet)
    (regrouped,) = ran.of(events.Regrouped)
    assert (regrouped.cause, regrouped.lost) == ("drain", (2,))
    assert regrouped.fetched
    assert ran.of(SwitchReport) == []


OFTEN = {("issued", 3), ("switched", 1), ("copied", 2), ("formed", 3)}
"""Cases that cover each phase and each rank, and the one that leaves as it is let go; `make bench` runs all cases."""
CASES = [
    pytest.param(phase, victim, marks=() if (phase, victim) in OFTEN else pytest.mark.soak)
    for phase in ("issued", "switched", "copied", "formed")
    for victim in (1, 2, 3)
]


@pytest.mark.parametrize(("phase", "victim"), CASES)
def test_a_rank_killed_in_any_phase_of_a_drain_costs_no_committed_step(
    tmp_path: Path, quiet: str, phase: str, victim: int
) -> None:
    """Rank 2 leaves; it, or a rank that stays, dies on the way."""
    seen: list[events.Event] = []
    phases: dict[str, Callable[[events.Event], bool]] = {
        "issued": lambda event: isinstance(event, events.Issued) and "copies for" in event.plan.reason,
        "switched": lambda event: isinstance(event, SwitchReport),
        "copied": lambda event: isinstance(event, StandbyReport) and event.step > 3,
        "formed": lambda event: isinstance(event, events.Formed) and event.generation.number == 2,
    }

    leave = leave_at(3, 2)

    def act(running: ElasticJob, event: events.Event) -> None:
        leave(running, event)
        if not seen and phases[phase](event):
            seen.append(event)
            running.signal(victim)

    ran = ElasticJob(job(tmp_path), act).run()
    assert seen, "the fault fired"
    assert isinstance(ran.state, JobFinished), ran.state
    assert ran.state_sha256 == quiet
    assert ran.steps == list(range(1, STEPS + 1)), "no committed step is lost"
    assert sum(regrouped.steps_lost for regrouped in ran.of(events.Regrouped)) == 0
    assert {rank for regrouped in ran.of(events.Regrouped) for rank in regrouped.lost} == {2, victim}
