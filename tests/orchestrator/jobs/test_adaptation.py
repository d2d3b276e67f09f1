"""Complete jobs on plain processes, of which a rank becomes slow: the load moves, and the bits stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from adapting_job import AdaptingJob
from made_profile import made_profile
from process_hosts import ElasticJob, Ran
from test_elastic_jobs import at_step, job

from orchestrator.events import types as events
from orchestrator.lifecycle.states import Finished
from orchestrator.prepare.resolve import Resolved
from planner.observed import StepTimes
from workers.fault_injection.fault import Fault
from workers.fault_injection.kinds import FaultKind
from workers.launch.ranks import Job, run_threads
from workers.protocol import FaultReport, StepReport

LAYERS = 10
PASS_S = 0.004
STEPS = 44
SLOW = 2
"""The place, and so the rank, that becomes slow."""


def made(folder: Path, policy: str = "measured", steps: int = STEPS, **sections: dict[str, Any]) -> Resolved:
    modelled = dict.fromkeys(("forward_s", "input_grad_s", "weight_grad_s"), PASS_S)
    return job(
        folder,
        job={"steps": steps},
        model={"layers": LAYERS - 2},
        cluster={"device": "emulated", "emulated": modelled},
        adapt={"policy": policy},
        **sections,
    )


def adapting(resolved: Resolved, act: Callable[[ElasticJob, events.Event], None]) -> AdaptingJob:
    outline = resolved.outline
    ranks = len(resolved.plan.stage_ranks)
    profile = made_profile(outline.layers, outline.parameters, ranks, weights=[PASS_S / 0.01] * LAYERS)
    return AdaptingJob(resolved, act, profile)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> str:
    done = made(tmp_path_factory.mktemp("quiet"), "off")
    return run_threads(Job(done.config, done.plan, done.schedule)).state_sha256


def slow(step: int, factor: float, steps: int | None = None) -> Callable[[ElasticJob, events.Event], None]:
    """Make the rank at place `SLOW` slow from a step on."""

    def act(running: ElasticJob, event: events.Event) -> None:
        if at_step(step)(event):
            running.call(SLOW, "arm", Fault(kind=FaultKind.SLOW, factor=factor, steps=steps))

    return act


def layers_at(ran: Ran, step: int) -> tuple[int, ...]:
    """Layers per stage that the ranks trained `step` with, by the moves that were over."""
    plans = {(event.plan.version): event.plan for event in ran.of(events.Issued)}
    layers = ran.of(events.Issued)[0].plan.layers_per_stage
    for moved in ran.of(events.Migrated):
        if moved.step < step:
            layers = plans[moved.version].layers_per_stage
    return layers


def test_a_rank_that_becomes_slow_is_relieved_and_loaded_again_with_the_same_bits(
    tmp_path: Path, quiet: str
) -> None:
    with_faults = {"elastic": {"allow_faults": True}}
    ran = adapting(made(tmp_path, **with_faults), slow(6, 3.0, steps=20)).run()
    assert isinstance(ran.state, Finished)
    assert ran.steps == list(range(1, STEPS + 1))
    assert ran.state_sha256 == quiet

    first, *changed = ran.of(events.SpeedsChanged)
    assert not first.changes
    assert [rank for rank, _ in first.slowdowns] == [0, 1, 2, 3]
    # A busy machine may slow ranks down before and meanwhile.
    (fault,) = ran.of(FaultReport)
    slower = next(event for event in changed if dict(event.slowdowns)[SLOW] > 2)
    assert slower.step - fault.step <= 3
    assert any(f"rank {SLOW} is " in said and " times slower since step " in said for said in slower.changes)
    away = next(
        decision for decision in ran.of(events.Adapted) if decision.moves and decision.layers[SLOW] == 1
    )
    assert away.step - fault.step <= 4
    assert away.then_s < 0.8 * away.now_s
    assert layers_at(ran, fault.step + 19)[SLOW] == 1
    assert layers_at(ran, STEPS)[SLOW] >= 2

    took = {report.step: report.step_s for report in ran.of(StepReport)}
    moved = next(event for event in ran.of(events.Migrated) if event.step > fault.step)
    before = median(took[step] for step in range(fault.step, moved.step + 1))
    after = median(took[step] for step in range(fault.step + 8, fault.step + 20))
    assert after < 0.85 * before, "of emulated layers, with a margin that any machine keeps"


def test_switched_off_nothing_is_measured_and_nothing_moves(tmp_path: Path, quiet: str) -> None:
    with_faults = {"elastic": {"allow_faults": True}}
    seen: list[StepTimes] = []
    running = adapting(made(tmp_path, "off", **with_faults), slow(8, 3.0, steps=10))
    running.observe = seen.append  # pyright: ignore[reportAttributeAccessIssue]
    ran = running.run()
    assert ran.state_sha256 == quiet
    assert seen == []
    assert not ran.of(events.SpeedsChanged)
    assert not ran.of(events.Migrated)


def test_a_slow_rank_is_remembered_when_another_one_dies(tmp_path: Path, quiet: str) -> None:
    with_faults = {"elastic": {"allow_faults": True}}
    killed: list[int] = []

    def act(running: ElasticJob, event: events.Event) -> None:
        slow(5, 3.0)(running, event)
        if isinstance(event, StepReport) and event.step == 20:
            killed.append(event.step)
            running.signal(0)

    ran = adapting(made(tmp_path, **with_faults), act).run()
    assert killed
    assert ran.state_sha256 == quiet
    (regrouped,) = ran.of(events.Regrouped)
    assert regrouped.lost == (0,)
    issued = [event.plan for event in ran.of(events.Issued) if event.plan.world_size == 3]
    # Rank 2 takes place 1 of the three that are left.
    counts = issued[0].layers_per_stage
    assert counts[1] < min(counts[0], counts[2])
