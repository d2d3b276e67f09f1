"""Complete jobs on plain processes, of which a rank becomes slow: the load moves, and the bits stay."""

from __future__ import annotations

from collections.abc import Callable
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

from adapting_job import AdaptingJob
from made_profile import made_profile
from process_hosts import ElasticJob
from test_elastic_jobs import at_step, job

from benchmarks.parts.rank_threads import run_threads
from orchestrator.events import types as events
from orchestrator.history.folder import JobFolder
from orchestrator.lifecycle.states import JobFinished
from orchestrator.prepare.settling import Settled
from planner.adapt.recording import Asked, Took, entries
from planner.adapt.replaying import Observed, ReplayedDecision, replayed
from planner.adapt.speeds import RankSlowdowns
from planner.observed import StepTimes
from workers.fault_injection.fault import Fault
from workers.fault_injection.kinds import FaultKind
from workers.launch.ranks import LaunchedJob
from workers.protocol.reports import FaultReport

LAYERS = 9
PASS_S = 0.004
STEPS = 40
SLOW = 2
"""The place, and so the rank, that becomes slow."""


def made(
    folder: Path,
    policy: str = "measured",
    *,
    steps: int = STEPS,
    pass_s: float = PASS_S,
    record: bool = False,
    **sections: dict[str, Any],
) -> Settled:
    modelled = dict.fromkeys(("forward_s", "input_grad_s", "weight_grad_s"), pass_s)
    return job(
        folder,
        job={"steps": steps},
        model={"layers": LAYERS - 2},
        cluster={"device": "emulated", "emulated": modelled},
        elastic={"allow_faults": True},
        adapt={"policy": policy, "record": record},
        **sections,
    )


def adapting(
    resolved: Settled, act: Callable[[ElasticJob, events.Event], None], places: int | None = None
) -> AdaptingJob:
    outline = resolved.outline
    ranks = places or len(resolved.plan.stage_ranks)
    profile = made_profile(outline.layers, outline.parameters, ranks, weights=[PASS_S / 0.01] * LAYERS)
    return AdaptingJob(resolved, act, profile)


def slow(step: int, factor: float, steps: int | None = None) -> Callable[[ElasticJob, events.Event], None]:
    """Make the rank at place `SLOW` slow from a step on."""

    def act(running: ElasticJob, event: events.Event) -> None:
        if at_step(step)(event):
            running.call(SLOW, "arm", Fault(kind=FaultKind.SLOW, factor=factor, steps=steps))

    return act


def is_slow(known: RankSlowdowns) -> bool:
    """Whether the rank at place `SLOW` is known to be slow."""
    return dict(known.by_rank).get(SLOW, 1.0) > 2


def quiet(folder: Path, steps: int = STEPS) -> str:
    """The state in which an undisturbed job ends."""
    done = made(folder, "off", steps=steps, pass_s=0.0, pipeline={"ranks": 2})
    return run_threads(LaunchedJob(done.config, done.plan, done.schedule)).state_sha256


def test_a_slow_rank_is_relieved_remembered_when_another_one_dies_and_loaded_again(tmp_path: Path) -> None:
    awaited: list[Callable[[events.Event], bool]] = [
        lambda event: isinstance(event, events.Issued) and len(event.plan.layers_of_place(SLOW)) == 1,
        lambda event: isinstance(event, events.Migrated),
    ]

    def act(running: ElasticJob, event: events.Event) -> None:
        slow(6, 3.0, steps=20)(running, event)
        if awaited and awaited[0](event):
            awaited.pop(0)
            if not awaited:
                running.signal(0)

    resolved = made(tmp_path / "slow", steps=80, record=True)
    ran = adapting(resolved, act).run()
    assert isinstance(ran.state, JobFinished)
    assert ran.steps == list(range(1, 81))
    assert ran.state_sha256 == quiet(tmp_path / "quiet", steps=80)

    first, *changed = ran.of(events.SpeedsChanged)
    assert not first.changes
    assert [rank for rank, _ in first.slowdowns] == [0, 1, 2, 3]
    assert ran.of(FaultReport)
    slower = next(event for event in changed if is_slow(RankSlowdowns(event.slowdowns)))
    assert any(f"rank {SLOW} is " in said and " times slower since step " in said for said in slower.changes)

    recorded = list(entries(JobFolder(resolved.config.job.folder).planner_path))
    answers = list(replayed(recorded))
    assert all(answer.same for answer in answers)
    decided = [answer for answer in answers if isinstance(answer, ReplayedDecision)]
    # The first decision that knows of it and does not wait until a busy machine's noise is told from it. After how many
    # steps is for `benchmarks/adaptation.py` to say.
    knowing = dropwhile(lambda entry: not (isinstance(entry, Took) and is_slow(entry.heard.known)), recorded)
    asked = [entry for entry in knowing if isinstance(entry, Asked)]
    decisions = [answer.decision for entry in asked for answer in decided if answer.asked == entry]
    held_back = list(takewhile(lambda decision: decision.plan is None, decisions))
    assert [decision.reason for decision in held_back if not decision.too_soon] == []
    away = decisions[len(held_back)]
    assert away.plan is not None
    # By how much depends on what else the machine does.
    assert away.then_s < away.now_s
    # Copies come before the layers.
    *_, relieved = (event.plan for event in ran.of(events.Issued) if event.plan.reason == away.reason)
    held = [len(relieved.layers_of_place(place)) for place in range(4)]
    assert held[SLOW] == min(held) < LAYERS / 4

    (regrouped,) = ran.of(events.Regrouped)
    assert regrouped.lost == (0,)
    # Rank 2 takes place 1 of the three that are left.
    for_three = [event.plan for event in ran.of(events.Issued) if event.plan.world_size == 3]
    counts = for_three[0].layers_per_stage
    assert counts[1] < min(counts[0], counts[2])
    assert for_three[-1].layers_per_stage[1] > counts[1]

    logged = ran.of(events.Adapted)
    assert [(each.decision.reason, each.decision.then_s) for each in decided[: len(logged)]] == [
        (each.reason.partition("; but ")[0], each.then_s) for each in logged
    ]
    seen = [change for answer in answers if isinstance(answer, Observed) for change in answer.heard.changes]
    assert set(seen) >= {said for event in changed for said in event.changes}


def test_switched_off_nothing_is_measured_and_nothing_moves(tmp_path: Path) -> None:
    seen: list[StepTimes] = []
    running = adapting(made(tmp_path / "slow", "off", steps=12), slow(4, 3.0))
    running.observe = seen.append  # pyright: ignore[reportAttributeAccessIssue]
    ran = running.run()
    assert ran.state_sha256 == quiet(tmp_path / "quiet", steps=12)
    assert ran.of(FaultReport)
    assert seen == []
    assert not ran.of(events.SpeedsChanged)
    assert not ran.of(events.Migrated)


def test_a_slow_pipeline_gets_a_smaller_share_and_loses_a_rank_then(tmp_path: Path) -> None:
    def two_pipelines(folder: Path, policy: str, pass_s: float = PASS_S) -> Settled:
        return made(
            folder, policy, steps=24, pass_s=pass_s, pipeline={"ranks": 4, "replicas": 2, "microbatches": 4}
        )

    def act(running: ElasticJob, event: events.Event) -> None:
        if at_step(5)(event):
            for rank in (2, 3):
                running.call(rank, "arm", Fault(kind=FaultKind.SLOW, factor=3.0))
        if isinstance(event, events.Migrated) and event.shares and event.step > 5:
            running.signal(3)

    ran = adapting(two_pipelines(tmp_path / "slow", "measured"), act, places=4).run()
    assert isinstance(ran.state, JobFinished)
    assert ran.steps == list(range(1, 25))
    even = two_pipelines(tmp_path / "quiet", "off", pass_s=0.0)
    assert ran.state_sha256 == run_threads(LaunchedJob(even.config, even.plan, even.schedule)).state_sha256
    shared = [move for move in ran.of(events.Migrated) if move.shares and move.step > 5]
    assert shared[0].shares[0] > shared[0].shares[1]
    assert ran.of(events.Regrouped)
