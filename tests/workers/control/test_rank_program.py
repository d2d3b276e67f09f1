"""A rank's part of a schedule: what it names, and that its size does not depend on how many ranks there are."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from planner.lowering import lower
from planner.plan import Plan
from planner.rank_program import rank_programs
from planner.schedule.passes import add_recompute
from planner.schedule.registry import build
from planner.search.standbys import assign
from planner.search.unmeasured import unmeasured_plan
from workers.commit.next_plan import NextPlan
from workers.protocol.orders import Assignment, Generation, StateSource

LAYERS_PER_RANK = 2


def test_a_rank_gets_its_own_actions_and_the_places_of_the_stages_beside_its_own() -> None:
    schedule = build("zbv", 4, 8)
    programs, groups = rank_programs(schedule), lower(schedule)
    for rank, program in enumerate(programs):
        own = schedule.stages_of_rank(rank)
        assert program.actions == schedule.programs[rank]
        assert program.own_stages == own
        assert program.groups == groups[rank]
        near = {other for stage in own for other in (stage - 1, stage, stage + 1)} & {*range(8)}
        assert program.rank_of_stage == {stage: schedule.rank_of_stage[stage] for stage in near}
        assert (program.rank, program.ranks, program.stages, program.microbatches) == (rank, 4, 8, 8)
    # Each is a part of the same schedule, and of no other one.
    assert len({program.schedule_sha256 for program in programs}) == 1
    assert rank_programs(add_recompute(schedule, [7]))[0].schedule_sha256 != programs[0].schedule_sha256


def test_ranks_prepare_the_same_plan_if_their_programs_are_of_one_schedule() -> None:
    schedule = build("1f1b", 3, 4)
    plan = unmeasured_plan(schedule, (1,) * 6, replicas=1)
    keys = {NextPlan(plan, program).key for program in rank_programs(schedule)}
    other = {NextPlan(plan, program).key for program in rank_programs(add_recompute(schedule, [1]))}
    assert len(keys) == len(other) == 1
    assert keys != other


def assignments(ranks: int, pipelines: int) -> list[Assignment]:
    """Of a job with `ranks` ranks in all, two layers on each rank of a pipeline, and a copy of each layer."""
    schedule = build("1f1b", ranks // pipelines, 8)
    layers = LAYERS_PER_RANK * schedule.ranks
    plan = unmeasured_plan(schedule, (1000,) * layers, replicas=pipelines)
    plan = with_standbys(plan, layers)
    programs = rank_programs(schedule)
    return [
        Assignment(
            place=place,
            plan=plan,
            program=programs[plan.place(place).rank],
            step=1000,
            sources=tuple(
                StateSource(layer=layer, rank=place, host=f"10.0.0.{place % 250}", port=40_000)
                for layer in plan.layers_of_place(place)
            ),
        )
        for place in range(ranks)
    ]


def with_standbys(plan: Plan, layers: int) -> Plan:
    domains = [f"node {place // 8}" for place in range(plan.world_size)]
    return replace(plan, standbys=assign(plan, domains, (1000,) * layers))


@pytest.mark.parametrize("deep", [True, False])
def test_an_assignment_is_as_large_for_64_ranks_as_for_8(deep: bool) -> None:
    sizes = [
        max(len(pickle.dumps(each)) for each in assignments(ranks, 1 if deep else ranks // 8))
        for ranks in (8, 64)
    ]
    assert sizes[0] < 2500
    # Larger numbers take a byte more, here and there.
    assert sizes[1] < 1.08 * sizes[0]


def test_an_assignment_arrives_as_it_was_sent() -> None:
    for each in assignments(16, 2):
        assert pickle.loads(pickle.dumps(each)) == each


def test_a_generation_of_a_thousand_takes_hardly_more_bytes_than_one_of_eight() -> None:
    few, many = (
        Generation(
            number=3,
            epoch=1,
            members=tuple(rank for rank in range(ranks + 3) if rank not in (1, 5, 6)),
            store_host="10.0.0.1",
            store_port=40_000,
            timeout_s=30.0,
        )
        for ranks in (8, 1000)
    )
    assert pickle.loads(pickle.dumps(many)) == many
    assert len(pickle.dumps(many)) < len(pickle.dumps(few)) + 50
