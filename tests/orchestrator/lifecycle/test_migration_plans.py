"""Which plan a move leads to, through which plans, and the errors for moves that are impossible."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from made_profile import made_profile
from ray_jobs import resolved
from tiny_jobs import tiny

from orchestrator.controller.requests.move_request import described, move_of_layers
from orchestrator.lifecycle.migration import RequestedMove, moved_layers, path
from orchestrator.lifecycle.states import JobData, Membership, Progress
from orchestrator.prepare.planning import replanner_of
from planner.arrivals import arrivals
from planner.plan import Plan
from planner.search.layer_move import with_layers
from planner.search.replan import Replanner
from planner.shards import Piece, Shard
from planner.simulation.predict import predict
from workers.protocol.errors import JobError

PLAN = Plan(
    epoch=1,
    version=1,
    reason="",
    layers=((0, 2), (2, 5), (5, 8), (8, 9)),
    stage_ranks=(0, 1, 2, 3),
    schedule="1f1b",
    chunks=1,
    microbatches=4,
    replicas=1,
    standbys=((1,), (1,), (0,), (0,), (2,), (1,), (3,), (3,), (2,)),
)


def test_the_layers_that_change_ranks_are_those_that_move() -> None:
    assert moved_layers(PLAN, with_layers(PLAN, 3, 5, 2)) == (3, 4)


def test_copies_come_first_and_go_last() -> None:
    then = replace(
        with_layers(PLAN, 3, 5, 2), standbys=((1,), (1,), (0,), (0,), (3,), (1,), (3,), (3,), (2,))
    )
    copying, taking, last = path(PLAN, then)
    assert copying.layers == PLAN.layers
    assert copying.standbys[3:5] == ((0, 2), (2,))
    assert arrivals(PLAN, then) == ((Piece(3), 2),)
    assert (taking.layers, taking.standbys[3:5]) == (then.layers, ((0, 1), (1, 3)))
    assert last == then


def test_places_that_take_snapshots_have_copies_only_of_what_moves_to_them() -> None:
    taken = tuple((place,) for (place,) in PLAN.standbys)
    now = replace(PLAN, standbys=(), snapshots=taken, snapshot_every=4)
    then = replace(with_layers(now, 3, 5, 2), snapshots=(*taken[:4], (3,), *taken[5:]))
    copying, last = path(now, then)
    assert copying.standbys == ((), (), (), (2,), (2,), (), (), (), ())
    assert (copying.snapshots, copying.snapshot_every) == (taken, 4)
    assert last == then
    assert path(now, replace(now, snapshots=then.snapshots)) != ()
    assert path(now, now) == ()


def test_a_copy_that_is_there_takes_over_at_once() -> None:
    then = replace(with_layers(PLAN, 4, 5, 2), standbys=(*PLAN.standbys[:4], (1,), *PLAN.standbys[5:]))
    assert path(PLAN, then) == (then,)
    assert arrivals(PLAN, then) == ()
    assert path(PLAN, PLAN) == ()


def test_without_redundancy_there_are_copies_only_on_the_way() -> None:
    now = replace(PLAN, standbys=())
    then = with_layers(now, 4, 5, 2)
    copying, taking = path(now, then)
    assert copying.standbys == ((), (), (), (), (2,), (), (), (), ())
    assert taking == then


def test_every_pipeline_gets_its_copy() -> None:
    now = replace(PLAN, standbys=(), replicas=2)
    assert path(now, with_layers(now, 4, 5, 2))[0].standbys[4] == (2, 6)


def test_every_shard_gets_its_copy_in_its_own_pipeline() -> None:
    now = replace(PLAN, replicas=2, shard="optimizer", standbys=((8,),) * 18)
    then = with_layers(now, 4, 5, 2)
    copying, taking, last = path(now, then)
    assert [copying.copies_of_piece(Piece(4, Shard(number, 2))) for number in (0, 1)] == [(2, 8), (6, 8)]
    assert copying.copies_of_piece(Piece(3, Shard(0, 2))) == (8,)
    # Who gives a shard up keeps a copy until those that are planned are up to date.
    assert [taking.copies_of_piece(Piece(4, Shard(number, 2))) for number in (0, 1)] == [(1, 8), (5, 8)]
    assert last == then
    bare = replace(now, standbys=())
    copying, last = path(bare, with_layers(bare, 4, 5, 2))
    assert {piece: places for piece, places in copying.copied if places} == {
        Piece(4, Shard(0, 2)): (2,),
        Piece(4, Shard(1, 2)): (6,),
    }
    assert last.standbys == ()


def test_other_shares_need_one_plan_and_no_copies() -> None:
    now = replace(PLAN, replicas=2, standbys=())
    then = replace(now, shares=(6, 2))
    assert path(now, then) == (then,)
    assert path(then, now) == (now,)
    assert path(then, then) == ()


def begun(folder: Path) -> tuple[JobData, Replanner]:
    done = resolved(tiny(folder, "job", model={"layers": 8}))
    members = (5, 1, 2, 7)
    nodes = {rank: f"n{rank}" for rank in members}
    return JobData(
        progress=Progress(plan=done.plan, schedule=done.schedule),
        membership=Membership(members=members, nodes=nodes),
    ), replanner_of(done)


def test_a_rank_is_told_by_its_number(tmp_path: Path) -> None:
    job, replanner = begun(tmp_path)

    def move(layers: tuple[int, int], rank: int) -> RequestedMove:
        return move_of_layers(job, replanner, layers, rank, mode="live", asked_s=0.0)

    with pytest.raises(
        JobError, match=r"rank 0 has no place in the pipeline; ranks with a place: 1, 2, 5, 7"
    ):
        move((2, 3), 0)
    with pytest.raises(
        JobError, match=r"cannot move to rank 7: .*can take layers 6 to 7 or the last of them"
    ):
        move((2, 3), 7)
    moved = move((2, 3), 5)
    assert moved.plan.layers == ((0, 3), (3, 5), (5, 8), (8, 10))
    assert moved.plan.reason == "layer 2 moves to rank 5, as asked"
    assert "a copy is there already" in described(job, moved)
    assert "copied while training goes on" in described(job, move((3, 5), 2))


def test_a_move_that_does_not_fit_the_memory_is_refused_by_how_much(tmp_path: Path) -> None:
    done = resolved(tiny(tmp_path, "job", model={"layers": 8}))
    job = JobData(
        progress=Progress(plan=done.plan, schedule=done.schedule), membership=Membership(members=(5, 1, 2, 7))
    )
    parameters = (1_000_000,) * 10
    roomy = made_profile(done.outline.layers, parameters, 4)

    def move(memory_bytes: int) -> RequestedMove:
        """A move of layers 2 and 3 to rank 5, in a job that keeps a copy of every layer."""
        profile = made_profile(done.outline.layers, parameters, 4, memory_bytes=memory_bytes)
        replanner = replace(replanner_of(done), profile=profile, parameters=parameters)
        return move_of_layers(job, replanner, (2, 4), 5, mode="live", asked_s=0.0)

    def most(plan: Plan) -> int:
        return max(predict(roomy, plan, done.schedule).memory.peak_bytes)

    then = move(10**9).plan
    afterwards, on_the_way = most(then), max(most(plan) for plan in path(job.progress.plan, then)[:-1])
    assert afterwards < on_the_way
    assert move(on_the_way).plan.layers == ((0, 4), (4, 5), (5, 8), (8, 10))
    # While the layers move, both ranks hold them, in addition to the existing copies.
    with pytest.raises(
        JobError, match=r"^cannot move to rank 5: place \d would need .*, which is 1 byte more"
    ):
        move(on_the_way - 1)
    with pytest.raises(JobError, match=r"than its device has: move fewer layers, or others away from it"):
        move(afterwards - 1)
