"""Uneven shares of a step: the bits, losses and samples of even ones, whoever executes which microbatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs import job, small_config
from rank_group import RankGroup, drilled, quiet_sha256, state_sha256
from test_engine_bits import losses
from test_freezing_training import FIRST, METHODS, SECOND
from test_pipelines import frozen

from benchmarks.parts.rank_threads import run_threads
from planner.plan import Plan
from planner.rank_program import place_programs, rank_programs
from planner.schedule.expand import pipeline_schedules
from workers.commit.next_plan import check_next
from workers.config import FreezeConfig
from workers.data.sampling import samples_digest, train_indices
from workers.fault_injection.fault import Fault, FaultKind, FaultPhase
from workers.launch.ranks import LaunchedJob, LaunchedRun, run_processes
from workers.protocol.errors import JobError
from workers.protocol.reports import PrefixFrozen, Report, StepReport, SwitchReport, ValidationReport

ENDLESS = 10_000
OTHER_METHODS = ("timelyfreeze", "apf", "timelyfreeze+autofreeze")


def shared(work: LaunchedJob, shares: tuple[int, ...], pipelines: int | None = None) -> LaunchedJob:
    """`work` with these shares of its pipelines."""
    plan = replace(work.plan, shares=shares, pipelines=pipelines)
    return replace(work, plan=plan, shared=schedules(work, plan))


def schedules(work: LaunchedJob, plan: Plan) -> tuple[Any, ...]:
    return pipeline_schedules(plan, work.schedule)


def digests(run: LaunchedRun) -> list[str]:
    return [r.samples_digest for r in run.reports if isinstance(r, StepReport)]


@pytest.mark.parametrize(
    ("schedule", "ranks", "shares", "pipelines"),
    [
        pytest.param("1f1b", 2, (6, 2), None, marks=pytest.mark.soak),
        ("1f1b", 2, (1, 7), None),
        ("gpipe", 1, (5, 3), None),
        ("zb-h1", 3, (5, 3), None),
        ("zbv", 2, (3, 5), None),
        ("interleaved", 2, (6, 2), None),
        ("1f1b", 2, (2, 7, 3), None),
        pytest.param("zb-h1", 2, (6, 1, 5), None, marks=pytest.mark.soak),
        pytest.param("1f1b", 2, (8, 4), 2, marks=pytest.mark.soak),
        ("zb-h1", 2, (5, 7), 2),
        ("1f1b", 2, (12,), 1),
    ],
)
def test_the_bits_are_those_of_even_shares(
    tmp_path: Path, schedule: str, ranks: int, shares: tuple[int, ...], pipelines: int | None
) -> None:
    replicas = sum(shares) // 4
    config = small_config(tmp_path, "dropout", replicas=replicas, validate_every=2)
    expected = run_threads(job(config, ranks=1))
    found = run_threads(shared(job(config, ranks=ranks, schedule=schedule), shares, pipelines))
    assert found.state_sha256 == expected.state_sha256
    assert losses(found) == losses(expected)
    assert digests(found) == digests(expected)
    assert [r for r in found.reports if isinstance(r, ValidationReport)] == [
        r for r in expected.reports if isinstance(r, ValidationReport)
    ]


# The other methods are made of these two: a program's ratios, and statistics of two kinds.
@pytest.mark.parametrize(
    "case",
    [
        *("tied", "twice", "attention", "raw-matrix", "timelyfreeze+apf", "autofreeze"),
        *(pytest.param(name, marks=pytest.mark.soak) for name in OTHER_METHODS),
    ],
)
def test_models_and_freezing_methods_keep_their_bits(tmp_path: Path, case: str) -> None:
    about: dict[str, Any] = {}
    fields: dict[str, Any] = {"replicas": 2}
    trait = case
    if case in METHODS:
        trait, fields["freeze"], fields["steps"] = "tied", METHODS[case], 9
        about["freeze_plans"] = (FIRST, SECOND) if METHODS[case].timely else ()
    config = small_config(tmp_path, trait, **fields)
    expected = run_threads(job(config, ranks=1, **about))
    found = run_threads(shared(job(config, ranks=2, schedule="zb-h1", **about), (6, 2)))
    assert found.state_sha256 == expected.state_sha256
    assert losses(found) == losses(expected)
    assert frozen(found.reports) == frozen(expected.reports)


def test_each_sample_is_used_where_it_belongs(tmp_path: Path) -> None:
    config = small_config(tmp_path, replicas=3)
    found = run_threads(shared(job(config, ranks=2, schedule="1f1b"), (2, 7, 3)))
    due = [
        samples_digest({g: train_indices(config.job.seed, step, g, 12, 2, 64) for g in range(12)})
        for step in range(config.job.steps)
    ]
    assert digests(found) == due
    # 5 steps of 24 samples are an epoch of 64 and most of a second: none is used a third time.
    used = [
        i for step in range(5) for g in range(12) for i in train_indices(config.job.seed, step, g, 12, 2, 64)
    ]
    assert sorted({used.count(sample) for sample in range(64)}) == [1, 2]


def test_a_model_with_buffers_refuses(tmp_path: Path) -> None:
    config = small_config(tmp_path, "batchnorm", replicas=2)
    with pytest.raises(JobError, match=r"has shares \[6, 2\], but training changes buffers of"):
        run_threads(shared(job(config, ranks=2, schedule="1f1b"), (6, 2)))


def test_processes_over_gloo_give_the_same_bits(tmp_path: Path) -> None:
    config = small_config(tmp_path, replicas=2)
    expected = run_threads(job(config, ranks=1))
    found = run_processes(shared(job(config, ranks=2, schedule="1f1b"), (6, 2)))
    assert found.state_sha256 == expected.state_sha256
    assert digests(found) == digests(expected)


def follow(group: RankGroup, work: LaunchedJob, plan: Plan) -> None:
    """Have all ranks follow `plan`, and train at least one step with it."""
    for place, program in enumerate(place_programs(plan, schedules(work, plan))):
        group.tell(place, "prepare_plan", plan, program, group.generation)

    def switched(reports: Sequence[Report]) -> bool:
        at = [r.step for r in reports if isinstance(r, SwitchReport) and r.version == plan.version]
        newest = max((r.step for r in reports if isinstance(r, StepReport)), default=0)
        return len(at) == plan.world_size and newest > at[0]

    group.wait_for(switched)


def versions(plan: Plan, *shares: tuple[int, ...]) -> list[Plan]:
    return [replace(plan, version=plan.version + 1 + n, shares=each) for n, each in enumerate(shares)]


@pytest.mark.parametrize("shares", [(6, 2), (3, 5)])
def test_layers_frozen_as_a_whole_keep_the_bits(tmp_path: Path, shares: tuple[int, ...]) -> None:
    by_hand = FreezeConfig(method="prefix", schedule=((2, 3), (4, 6)))
    config = small_config(tmp_path, "dropout", replicas=2, steps=6, freeze=by_hand)
    expected = run_threads(job(config, ranks=1))
    found = run_threads(shared(job(config, ranks=2, schedule="zb-h1"), shares))
    assert found.state_sha256 == expected.state_sha256
    assert losses(found) == losses(expected)
    assert [r.layers for r in found.reports if isinstance(r, PrefixFrozen)] == [3, 6]


def test_shares_change_at_commits_and_move_no_layer(tmp_path: Path) -> None:
    config = small_config(tmp_path, replicas=2, steps=ENDLESS)
    both = job(config, ranks=2, schedule="1f1b")
    with RankGroup(config, 4) as group:

        def change() -> None:
            for plan in versions(both.plan, (6, 2), (3, 5), ()):
                follow(group, both, plan)
            group.stop()

        ended = group.train(both, range(4), meanwhile=change)
        assert state_sha256(ended) == quiet_sha256(job(config, ranks=1), ended)
        assert sorted(group.steps()) == list(range(1, ended[0].step + 1))
        switches: list[SwitchReport] = group.of(SwitchReport)
        assert [s.version for s in switches].count(4) == 4
        assert {(s.taken, s.given) for s in switches} == {((), ())}


@pytest.mark.parametrize("phase", [FaultPhase.BACKWARD, FaultPhase.IN_COMMIT])
def test_a_kill_amid_uneven_shares_loses_no_step(tmp_path: Path, phase: FaultPhase) -> None:
    precision = "bfloat16" if phase is FaultPhase.IN_COMMIT else "float32"
    config = drilled(small_config(tmp_path, replicas=2, steps=6, precision=precision))
    uneven = shared(job(config, ranks=2, schedule="1f1b"), (6, 2))
    expected = run_threads(job(config, ranks=1))
    with RankGroup(config, 4) as group:
        group.arm(0, Fault(kind=FaultKind.KILL, step=3, phase=phase))
        group.train(uneven, range(4))
        assert [fired[2:] for fired in group.fired] == [(3, str(phase))]
        step, positions, sources = group.finish_commit()
        assert step >= 2
        assert {piece.layer for p in positions.values() for piece in p.holds} == set(range(8))
        left = job(config, ranks=3, schedule="1f1b")
        alone = replace(left, plan=replace(left.plan, pipelines=1))
        ended = group.train(alone, (3, 1, 2), step=step, sources=sources)
        assert state_sha256(ended) == expected.state_sha256
        assert sorted(group.steps()) == list(range(1, 7))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda plan: replace(plan, shares=(5, 2)), "add up to 8"),
        (lambda plan: replace(plan, shares=(6, 2)), "has 6 microbatches in the pipeline of place 0"),
    ],
)
def test_a_plan_whose_schedule_is_not_for_the_share_is_refused(
    tmp_path: Path, change: Callable[[Plan], Plan], said: str
) -> None:
    work = job(small_config(tmp_path, replicas=2), ranks=2, schedule="1f1b")
    with pytest.raises(JobError, match=said):
        check_next(change(replace(work.plan, version=2)), rank_programs(work.schedule)[0], work.plan, 0)
