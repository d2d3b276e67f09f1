"""Ranks that share out states lose each other, and go on: each shard at one step, put together anew for other plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import job, small_config
from rank_group import Raised, RankGroup, drilled, parted, state_sha256
from test_layer_shards import assert_same as assert_same_states
from test_shared_states import shared

from benchmarks.parts.rank_threads import run_threads
from planner.rank_program import rank_programs
from planner.shards import Piece, Shard, made_of
from workers.checkpoint.folder import checkpoint_folder, checkpoints, read_layer, read_manifest
from workers.config import WorkerConfig
from workers.fault_injection.fault import Fault, FaultKind, FaultPhase
from workers.launch.processes import Died
from workers.launch.ranks import LaunchedJob
from workers.protocol.carried import Carried
from workers.protocol.orders import Assignment, StateSource
from workers.protocol.reports import RankPosition
from workers.state.layer_state import LayerState

STEP = 3
LAYERS = range(8)


def pieces(of: int) -> set[Piece]:
    return {Piece(layer, Shard(number, of)) for layer in LAYERS for number in range(of)}


def held(positions: dict[int, RankPosition], step: int) -> set[Piece]:
    return {piece for position in positions.values() if position.step == step for piece in position.holds}


def lose_rank_1(
    group: RankGroup, four: LaunchedJob, step: int, phase: FaultPhase, blind: Sequence[int], *, reached: int
) -> tuple[dict[int, RankPosition], list[StateSource]]:
    """Train `four` until rank 1 is killed in `phase` of `step`, then finish the commit at `reached`, all layers there.

    Args:
        blind: ranks that do not learn of that step's commit.
    """
    group.arm(1, Fault(kind=FaultKind.KILL, step=step, phase=phase))
    for number in blind:
        group.arm(number, Fault(kind=FaultKind.BLIND, step=step))
    ended = group.train(four, range(4))
    assert isinstance(ended[1], Died)
    assert all(isinstance(ended[number], Raised) for number in (0, 2, 3)), ended
    assert (1, "kill", step, str(phase)) in group.fired
    found, positions, sources = group.finish_commit()
    assert found == reached
    there = held(positions, found)
    assert all(made_of(layer, there) for layer in LAYERS)
    return positions, sources


def one_pipeline(config: WorkerConfig, ranks: int) -> LaunchedJob:
    work = job(config, ranks=ranks, schedule="1f1b")
    return replace(work, plan=replace(work.plan, pipelines=1))


@pytest.mark.parametrize(
    ("phase", "blind", "reached", "precision"),
    [
        pytest.param(FaultPhase.FORWARD, (), STEP - 1, "float32", marks=pytest.mark.soak),
        (FaultPhase.BEFORE_COMMIT, (), STEP - 1, "bfloat16"),
        (FaultPhase.IN_COMMIT, (0, 3), STEP, "bfloat16"),
        (FaultPhase.IN_COMMIT, (0, 1, 2, 3), STEP - 1, "float32"),
        (FaultPhase.AFTER_COMMIT, (), STEP, "float16"),
    ],
)
def test_broken_links_leave_every_shard_at_one_step(
    tmp_path: Path, phase: FaultPhase, blind: tuple[int, ...], reached: int, precision: str
) -> None:
    """All ranks live. Afterwards they go on as they were, or with whole states in one pipeline."""
    config = drilled(small_config(tmp_path, "tied", steps=6, replicas=2, precision=precision))
    expected = run_threads(job(config)).state_sha256
    four = shared(job(config, ranks=2, schedule="zb-h1"))
    then = four if phase in (FaultPhase.FORWARD, FaultPhase.IN_COMMIT) else one_pipeline(config, 4)
    with RankGroup(config, 4) as group:
        group.arm(1, Fault(kind=FaultKind.DROP_LINK, step=STEP, phase=phase))
        for number in blind:
            group.arm(number, Fault(kind=FaultKind.BLIND, step=STEP))
        ended = group.train(four, range(4))
        assert all(isinstance(answer, Raised) for answer in ended.values()), ended
        assert (1, "drop-link", STEP, str(phase)) in group.fired
        step, positions, sources = group.finish_commit()
        assert step == reached
        assert {position.step for position in positions.values()} == {reached}
        assert held(positions, step) == pieces(2)
        carried = positions[0].carried
        ended = group.train(then, range(4), step=step, sources=sources, carried=carried)
        assert state_sha256(ended) == expected
        assert sorted(group.steps()) == list(range(1, 7))


def test_plans_with_more_fewer_and_no_shards_follow_each_other(tmp_path: Path) -> None:
    config = drilled(
        small_config(tmp_path, "dropout", steps=9, replicas=4, microbatches=2, precision="bfloat16")
    )
    expected = run_threads(job(config)).state_sha256
    two = shared(job(config, ranks=2, schedule="1f1b"), 2)
    four = shared(job(config, ranks=1))
    whole = job(config, ranks=2, schedule="gpipe")
    whole = replace(whole, plan=replace(whole.plan, pipelines=2))
    three = shared(job(config, ranks=1), 3)
    sources: list[StateSource] = []
    step = 0
    with RankGroup(config, 4) as group:
        for work, of in ((two, 2), (four, 4), (whole, 1), (three, 3), (two, 2)):
            members = tuple(range(work.plan.world_size))
            ended = group.train(work, members, step=step, sources=sources, regroup_by=0)
            assert parted(ended) == {step + 1}
            step, positions, sources = group.finish_commit()
            found = held(positions, step)
            assert found == (pieces(of) if of > 1 else set(map(Piece, LAYERS)))
        ended = group.train(one_pipeline(config, 3), (3, 1, 2), step=step, sources=sources)
        assert state_sha256(ended) == expected
        assert sorted(group.steps()) == list(range(1, 10))


def test_shards_that_arrived_are_kept_when_others_do_not(tmp_path: Path) -> None:
    """The rank that they came from dies meanwhile."""
    config = drilled(small_config(tmp_path, steps=5, replicas=2))
    expected = run_threads(job(config)).state_sha256
    both, alone = shared(job(config, ranks=1)), one_pipeline(config, 1)
    with RankGroup(config, 3) as group:
        assert parted(group.train(both, (0, 1), regroup_by=0)) == {1}
        step, _, sources = group.finish_commit()
        broken = [replace(each, port=1) if each.shard.number else each for each in sources]
        order = Assignment(
            place=0,
            plan=alone.plan,
            program=rank_programs(alone.schedule)[0],
            step=step,
            sources=tuple(broken),
            carried=Carried(),
        )
        (answer,) = group.call("follow", {2: (order,)}).values()
        assert isinstance(answer, Raised)
        assert "cannot connect" in answer.error
        position: RankPosition = group.call("position", {2: ()})[2]
        assert position.step == step
        assert {*position.holds} == {Piece(layer, Shard(0, 2)) for layer in LAYERS}
        group.tell(0, "die")
        group.wait_for(lambda _: 0 not in group.alive)
        left = [each for each in sources if each.rank == 1]
        own = [
            StateSource(layer=piece.layer, shard=piece.shard, rank=2, host=position.host, port=position.port)
            for piece in position.holds
        ]
        ended = group.train(alone, (2,), step=step, sources=[*left, *own])
        assert state_sha256(ended) == expected


def test_shards_are_written_as_whole_layers_before_the_ranks_may_fail(tmp_path: Path) -> None:
    """As whole states are, tensor for tensor."""
    kept: dict[str, list[LayerState]] = {}
    for name, share in (("shared", shared), ("whole", lambda work: work)):
        config = drilled(small_config(tmp_path / name, "tied", steps=5, replicas=2, precision="bfloat16"))
        with RankGroup(config, 2) as group:
            work = share(job(config, ranks=1))
            group.train(work, (0, 1), regroup_by=0)
            step, _, sources = group.finish_commit()
            folder = checkpoint_folder(config.job.folder, step, 1)
            halves = {0: tuple(LAYERS)[::2], 1: tuple(LAYERS)[1::2]}
            told = {n: (folder, step, layers, tuple(sources)) for n, layers in halves.items()}
            records = [record for written in group.call("save", told).values() for record in written]
            told = {0: (folder, step, work.plan, 1, records)}
            assert group.call("seal", told) == {0: None}
        (ref,) = checkpoints(config.job.folder)
        kept[name] = [read_layer(ref, read_manifest(ref), layer) for layer in LAYERS]
    for one, other in zip(kept["shared"], kept["whole"], strict=True):
        assert_same_states(one, other)
