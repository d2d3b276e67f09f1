"""Ranks that share out sums of gradients lose each other and go on, and meet faults: with the bits of a quiet run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs import job, small_config
from rank_group import RankGroup, drilled, parted, state_sha256, with_standbys
from test_gradient_shards import folded
from test_shard_copies import copied
from test_shard_recovery import LAYERS, held, lose_rank_1

from benchmarks.parts.rank_threads import run_threads
from planner.shards import Piece, Shard
from workers.checkpoint.folder import checkpoints
from workers.config import CheckpointConfig
from workers.fault_injection.fault import Fault, FaultKind, FaultPhase
from workers.launch.ranks import LaunchedJob
from workers.protocol.errors import JobError
from workers.protocol.reports import StepReport

STEP = 3


def with_copies(work: LaunchedJob) -> LaunchedJob:
    """`work` with gradients shared out and a copy of each shard on another rank."""
    work = copied(work)
    return replace(work, plan=replace(work.plan, shard="gradients"))


@pytest.mark.parametrize(
    ("phase", "blind", "reached", "precision", "then"),
    [
        (FaultPhase.BACKWARD, (), STEP - 1, "bfloat16", "spare"),
        (FaultPhase.FORWARD, (), STEP - 1, "float16", "fewer"),
        (FaultPhase.BEFORE_COMMIT, (), STEP - 1, "float32", "alone"),
        (FaultPhase.IN_COMMIT, (0, 3), STEP, "bfloat16", "alone"),
    ],
)
def test_a_killed_ranks_shards_go_on_elsewhere(
    tmp_path: Path, phase: FaultPhase, blind: tuple[int, ...], reached: int, precision: str, then: str
) -> None:
    config = drilled(small_config(tmp_path, "tied", steps=6, replicas=2, precision=precision))
    expected = run_threads(folded(job(config), 1)).state_sha256
    four = with_copies(job(config, ranks=2, schedule="zb-h1"))
    with RankGroup(config, 5) as group:
        positions, sources = lose_rank_1(group, four, STEP, phase, blind, reached=reached)
        following, members = {
            "spare": (four, (0, 4, 2, 3)),
            "fewer": (with_copies(job(config, ranks=1)), (3, 0)),
            "alone": (folded(job(config, ranks=3, schedule="1f1b"), 1), (0, 2, 3)),
        }[then]
        carried = next((p.carried for p in positions.values() if p.carried is not None), None)
        ended = group.train(following, members, step=reached, sources=sources, carried=carried)
        assert state_sha256(ended) == expected
        assert sorted(group.steps()) == list(range(1, 7))


def test_one_pipeline_of_all_replicas_has_copies_of_whole_layers(tmp_path: Path) -> None:
    config = drilled(small_config(tmp_path, "tied", steps=5, replicas=2))
    expected = run_threads(folded(job(config), 1)).state_sha256
    three = folded(job(config, ranks=3, schedule="1f1b"), 1)
    three = replace(three, plan=with_standbys(three))
    with RankGroup(config, 3) as group:
        group.arm(1, Fault(kind=FaultKind.KILL, step=STEP, phase=FaultPhase.IN_COMMIT))
        group.train(three, range(3))
        assert (1, "kill", STEP, "in-commit") in group.fired
        step, positions, sources = group.finish_commit()
        assert {piece.layer for piece in held(positions, step)} == set(LAYERS)
        two = folded(job(config, ranks=1))
        ended = group.train(two, (2, 0), step=step, sources=sources)
        assert state_sha256(ended) == expected


def test_three_pipelines_become_two_and_one_and_three_again(tmp_path: Path) -> None:
    config = drilled(small_config(tmp_path, "dropout", steps=7, replicas=3, precision="bfloat16"))
    expected = run_threads(folded(job(config), 1)).state_sha256
    three, two = (folded(job(config, ranks=1, schedule="1f1b"), count) for count in (3, 2))
    one = folded(job(config, ranks=2, schedule="1f1b"), 1)
    step, sources = 0, []
    with RankGroup(config, 3) as group:
        for work, of in ((three, 3), (two, 2), (one, 1)):
            members = tuple(range(work.plan.world_size))
            ended = group.train(work, members, step=step, sources=sources, regroup_by=0)
            assert parted(ended) == {step + 1}
            step, positions, sources = group.finish_commit()
            pieces = {Piece(layer, Shard(number, of)) for layer in LAYERS for number in range(of)}
            assert held(positions, step) == pieces
        ended = group.train(three, (2, 0, 1), step=step, sources=sources)
        assert state_sha256(ended) == expected
        assert sorted(group.steps()) == list(range(1, 8))


def test_a_checkpoint_goes_on_with_another_number_of_pipelines(tmp_path: Path) -> None:
    def config(folder: str) -> Any:
        checkpoint = CheckpointConfig(every_steps=3)
        return small_config(tmp_path / folder, "tied", replicas=3, steps=6, checkpoint=checkpoint)

    expected = run_threads(folded(job(config("quiet")), 1)).state_sha256
    begun = folded(job(config("three"), ranks=2, schedule="1f1b"))
    assert {outcome.step for outcome in run_threads(replace(begun, stop_at=3)).outcomes} == {3}
    (start,) = checkpoints(str(tmp_path / "three"))
    for pipelines in (1, 2):
        then = folded(job(config(f"after {pipelines}"), ranks=2, schedule="zb-h1"), pipelines)
        assert run_threads(replace(then, start=start)).state_sha256 == expected


def test_a_step_with_a_nan_is_skipped_and_the_next_begins_from_nothing(tmp_path: Path) -> None:
    config = drilled(small_config(tmp_path, steps=4, replicas=2))
    alone, four = folded(job(config), 1), folded(job(config, ranks=2, schedule="zb-h1"))
    ends: set[str] = set()
    for work in (alone, four):
        with RankGroup(config, 4) as group:
            group.arm(0, Fault(kind=FaultKind.NAN, step=2))
            ends.add(state_sha256(group.train(work, range(work.plan.world_size))))
            assert (0, "nan", 2, "backward") in group.fired
            told: dict[int, StepReport] = group.steps()
            assert [step for step, report in told.items() if report.skipped] == [2]
    assert len(ends) == 1
    assert ends != {run_threads(alone).state_sha256}


def test_a_slow_sibling_changes_no_bit(tmp_path: Path) -> None:
    config = drilled(small_config(tmp_path, steps=4, replicas=2))
    expected = run_threads(folded(job(config), 1)).state_sha256
    four = folded(job(config, ranks=2, schedule="zb-h1"))
    with RankGroup(config, 4) as group:
        for number, factor in ((2, 6.0), (3, 3.0)):
            group.arm(number, Fault(kind=FaultKind.SLOW, step=2, factor=factor, steps=2))
        ended = group.train(four, range(4))
        assert {(rank, fault.split()[0]) for rank, fault, _, _ in group.fired} == {(2, "slow"), (3, "slow")}
        assert state_sha256(ended) == expected


def test_running_statistics_are_refused(tmp_path: Path) -> None:
    config = small_config(tmp_path, "batchnorm", replicas=2)
    for pipelines in (1, 2):
        with pytest.raises(
            JobError, match=r'shard = "gradients" may have .* changes buffers of l3: use "optimizer"'
        ):
            run_threads(folded(job(config), pipelines))
