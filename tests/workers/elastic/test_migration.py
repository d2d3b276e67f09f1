"""Layers that change ranks while training goes on: the same bits, whatever state a layer keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import job
from rank_group import RankGroup, quiet_sha256, state_sha256, with_standbys
from test_freezing_training import METHODS
from test_standby import configured

from benchmarks.parts.configs import changed
from benchmarks.parts.rank_threads import run_threads
from planner.arrivals import Arrivals
from planner.plan import Plan
from planner.rank_program import RankProgram, rank_programs
from planner.schedule.expand import schedule_of
from planner.shards import Piece
from workers.fault_injection.fault import Fault, FaultKind, FaultPhase
from workers.launch.ranks import LaunchedJob
from workers.protocol.reports import StepReport, SwitchReport, WarningReport

Layers = tuple[tuple[int, int], ...]
ENDLESS = 10_000
"""Steps of a job that a test stops once everything it expects has happened."""


def cut(plan: Plan, counts: Sequence[int]) -> Layers:
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    return tuple((start, start + count) for start, count in zip(starts, counts, strict=True))


def moving(begun: LaunchedJob, counts: Sequence[int], plan: Plan | None = None) -> tuple[Plan, Plan]:
    """The two plans that lead from the plan of `begun`, or from `plan`, to `counts` layers per stage. The
    first makes the copies; in the second they take over, and copies stay where the layers came from."""
    plan = plan or begun.plan
    layers = cut(plan, counts)
    target = replace(plan, layers=layers)
    owner = [plan.stage_ranks[plan.stage_of_layer(layer)] for layer in range(plan.layers[-1][1])]
    heir = [target.stage_ranks[target.stage_of_layer(layer)] for layer in range(plan.layers[-1][1])]
    kept = plan.standbys or ((),) * len(owner)
    first, second = [], []
    for layer, places in enumerate(kept):
        moved = owner[layer] != heir[layer]
        first.append((*places, *((heir[layer],) if moved and heir[layer] not in places else ())))
        there = (*((owner[layer],) if moved else ()), *(place for place in places if place != heir[layer]))
        second.append(tuple(dict.fromkeys(there)))
    copying = replace(plan, version=plan.version + 1, reason="copy", standbys=tuple(first))
    taking = replace(target, version=plan.version + 2, reason="take over", standbys=tuple(second))
    return copying, taking


def program(job: LaunchedJob, plan: Plan, place: int) -> RankProgram:
    return rank_programs(job.schedule)[plan.place(place).rank]


def tell(group: RankGroup, job: LaunchedJob, members: Sequence[int], plan: Plan) -> None:
    for place, number in enumerate(members):
        group.tell(number, "prepare_plan", plan, program(job, plan, place), group.generation)


def follow(group: RankGroup, job: LaunchedJob, members: Sequence[int], plan: Plan) -> None:
    """Have `members` follow `plan`, and wait until they do."""
    tell(group, job, members, plan)
    group.wait_for(
        lambda reports: (
            sum(isinstance(r, SwitchReport) and r.version == plan.version for r in reports) == len(members)
        )
    )


# That layers take the statistics of each method along is tested where their counts are.
@pytest.mark.parametrize(
    "case",
    [
        *("gpt", "tied", "batchnorm", "timelyfreeze+apf", "autofreeze"),
        *(
            pytest.param(method, marks=pytest.mark.soak)
            for method in METHODS
            if method not in ("timelyfreeze+apf", "autofreeze")
        ),
    ],
)
def test_layers_move_up_and_down_with_the_same_bits(tmp_path: Path, case: str) -> None:
    config, about = configured(tmp_path, case)
    config = changed(config, steps=ENDLESS)
    three = job(config, ranks=3, schedule="zb-h1", counts=(3, 3, 2), **about)
    with RankGroup(config, 3) as group:

        def move() -> None:
            group.wait_for(lambda reports: any(isinstance(r, StepReport) for r in reports))
            copying, taking = moving(three, (1, 5, 2))
            follow(group, three, range(3), copying)
            follow(group, three, range(3), taking)
            back, there = moving(three, (4, 2, 2), taking)
            follow(group, three, range(3), back)
            follow(group, three, range(3), there)
            group.stop()

        ended = group.train(three, range(3), plan=with_standbys(three), meanwhile=move)
        assert state_sha256(ended) == quiet_sha256(job(config, **about), ended)
        assert sorted(group.steps()) == list(range(1, ended[0].step + 1))
        switches: list[SwitchReport] = group.of(SwitchReport)
        assert {(s.version, s.rank, s.taken) for s in switches if s.taken} == {
            (3, 1, (1, 2)),
            (5, 0, (1, 2, 3)),
        }
        assert {layer for outcome in ended.values() for layer, _ in outcome.layer_digests} == set(range(8))
        assert [layer for layer, _ in ended[0].layer_digests] == [0, 1, 2, 3]
        assert not group.of(WarningReport)


def test_ranks_exchange_their_parts_with_the_same_bits(tmp_path: Path) -> None:
    """Stages come to other ranks, layers to other stages, and everything back."""
    config, about = configured(tmp_path, "batchnorm")
    config = changed(config, steps=ENDLESS)
    three = job(config, ranks=3, schedule="zb-h1", counts=(3, 3, 2), **about)
    now = with_standbys(three)
    layers = range(now.layers[-1][1])
    with RankGroup(config, 3) as group:

        def exchange() -> None:
            group.wait_for(lambda reports: any(isinstance(r, StepReport) for r in reports))
            plan = now
            for stage_ranks, counts in (((2, 0, 1), (1, 3, 4)), ((0, 1, 2), (3, 3, 2))):
                then = replace(
                    plan,
                    layers=cut(plan, counts),
                    stage_ranks=stage_ranks,
                    standbys=tuple((plan.rank_of_layer(layer),) for layer in layers),
                )
                copying = replace(
                    plan,
                    version=plan.version + 1,
                    standbys=tuple(
                        tuple(
                            sorted(
                                {*plan.copies_of(layer), *then.owners_of(layer)} - {*plan.owners_of(layer)}
                            )
                        )
                        for layer in layers
                    ),
                )
                then = replace(
                    then,
                    version=plan.version + 2,
                    standbys=tuple(
                        tuple({*plan.owners_of(layer), *plan.copies_of(layer)} - {*then.owners_of(layer)})
                        for layer in layers
                    ),
                )
                for following in (copying, then):
                    placed = replace(three, schedule=schedule_of(following))
                    follow(group, placed, range(3), following)
                plan = then
            group.stop()

        ended = group.train(three, range(3), plan=now, meanwhile=exchange)
        assert state_sha256(ended) == quiet_sha256(job(config, **about), ended)
        assert sorted(group.steps()) == list(range(1, ended[0].step + 1))
        switches: list[SwitchReport] = group.of(SwitchReport)
        taken = {(s.version, s.rank): s.taken for s in switches if s.taken}
        assert taken == {
            (3, 0): (3,),
            (3, 1): (6, 7),
            (3, 2): (0,),
            (5, 0): (0,),
            (5, 1): (3,),
            (5, 2): (6, 7),
        }
        assert not group.of(WarningReport)


def deferring(group: RankGroup, job: LaunchedJob, held: Arrivals, copying: Plan, taking: Plan) -> None:
    group.wait_for(lambda reports: any(isinstance(r, StepReport) for r in reports))
    for number in range(3):
        group.tell(number, "prepare_plan", copying, program(job, copying, number), group.generation, held)
    group.wait_for(lambda reports: sum(isinstance(r, SwitchReport) and r.version == 2 for r in reports) == 3)
    # After only one step the held-back update would lag no more than it does anyway.
    begun = group.of(SwitchReport)[0].step
    group.wait_for(lambda reports: any(isinstance(r, StepReport) and r.step == begun + 3 for r in reports))
    follow(group, job, range(3), taking)
    group.stop()


def test_deferred_updates_change_the_bits_and_nothing_else(tmp_path: Path) -> None:
    config, about = configured(tmp_path, "batchnorm")
    config = changed(config, steps=ENDLESS)
    three = job(config, ranks=3, schedule="1f1b", counts=(3, 3, 2), **about)
    copying, taking = moving(three, (3, 1, 4), with_standbys(three, 2))
    held = ((Piece(4), 2), (Piece(5), 2))
    assert [copying.copies_of_piece(piece) for piece, _ in held] == [(0, 2), (0, 2)]
    with RankGroup(config, 3) as group:
        ended = group.train(
            three,
            range(3),
            plan=with_standbys(three, 2),
            meanwhile=lambda: deferring(group, three, held, copying, taking),
        )
        assert state_sha256(ended) != quiet_sha256(job(config, **about), ended)
        assert sorted(group.steps()) == list(range(1, ended[0].step + 1))
        assert [layer for layer, _ in ended[2].layer_digests] == [4, 5, 6, 7]
        assert not group.of(WarningReport)


@pytest.mark.parametrize("lost", [1, 2])
def test_a_loss_on_either_side_voids_the_move(tmp_path: Path, lost: int) -> None:
    """The source (1) or the destination (2) dies during the copy, and the job goes on as without a move."""
    config, about = configured(tmp_path, "batchnorm")
    config = changed(config, steps=ENDLESS)
    three = job(config, ranks=3, schedule="1f1b", counts=(3, 3, 2), **about)
    plan = with_standbys(three, 2)
    copying, taking = moving(three, (3, 1, 4), plan)
    with RankGroup(config, 3) as group:
        if lost == 2:
            group.arm(2, Fault(kind=FaultKind.KILL, step=1, phase=FaultPhase.MIGRATING))

        def move() -> None:
            group.wait_for(lambda reports: any(isinstance(r, StepReport) for r in reports))
            tell(group, three, range(3), copying)
            if lost == 2:
                return
            group.wait_for(lambda reports: any(isinstance(r, SwitchReport) for r in reports))
            group.tell(lost, "die")
            for number in (0, 2):
                group.tell(number, "prepare_plan", taking, program(three, taking, number), group.generation)

        group.train(three, range(3), plan=plan, meanwhile=move)
        assert group.alive == [number for number in range(3) if number != lost]
        step, positions, sources = group.finish_commit()
        assert {piece.layer for p in positions.values() for piece in p.holds} == set(range(8))
        two = job(config, ranks=2, schedule="1f1b", **about)
        plan = with_standbys(two)
        ended = group.train(two, group.alive, plan=plan, step=step, sources=sources, meanwhile=group.stop)
        assert state_sha256(ended) == quiet_sha256(job(config, **about), ended)
        assert sorted(group.steps()) == list(range(1, ended[0].step + 1))


def test_nobody_follows_a_plan_that_one_rank_does_not_know(tmp_path: Path) -> None:
    config, about = configured(tmp_path, "plain")
    config = changed(config, steps=12)
    two = job(config, ranks=2, schedule="1f1b", **about)
    copying, _ = moving(two, (3, 5))
    with RankGroup(config, 2) as group:
        ended = group.train(two, range(2), meanwhile=lambda: tell(group, two, (0,), copying))
        assert state_sha256(ended) == run_threads(job(config, **about)).state_sha256
        assert not group.of(SwitchReport)
