"""Siblings come to the same place of the one order of summation together, whoever executes which microbatch."""

from __future__ import annotations

from typing import Any

import pytest

from planner.plan import Plan
from planner.rounds import busy_pipelines, executed_by, order, windows_of
from planner.shares import most_parts, numbers_of


def plan(replicas: int, microbatches: int, **changes: Any) -> Plan:
    return Plan(
        epoch=1,
        version=1,
        reason="test",
        layers=((0, 4),),
        stage_ranks=(0,),
        schedule="1f1b",
        chunks=1,
        microbatches=microbatches,
        replicas=replicas,
        shard="gradients",
        **changes,
    )


def test_the_order_is_by_microbatch_and_then_by_replica() -> None:
    assert order(plan(3, 2)) == (0, 2, 4, 1, 3, 5)


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("pipelines", [1, 2, 3, 4, 5])
def test_in_each_round_every_busy_pipeline_has_the_next_microbatch(
    replicas: int, microbatches: int, pipelines: int
) -> None:
    if pipelines > replicas:
        return
    some = plan(replicas, microbatches, pipelines=pipelines)
    windows = [windows_of(some, pipeline) for pipeline in range(pipelines)]
    found: list[int] = []
    for number, busy in enumerate(busy_pipelines(some)):
        assert [len(own) > number for own in windows] == [pipeline < busy for pipeline in range(pipelines)]
        for own in zip(*(own[number] for own in windows[:busy]), strict=True):
            found += own
    assert tuple(found) == order(some)
    assert len(busy_pipelines(some)) == some.windows
    assert {len(window) for own in windows for window in own} == {microbatches}


def test_as_many_pipelines_as_replicas_have_one_each() -> None:
    assert windows_of(plan(2, 3), 1) == ((3, 4, 5),)
    assert most_parts(plan(2, 3)) == 1


def test_with_uneven_shares_all_come_to_a_part_of_their_share_together() -> None:
    some = plan(2, 4, shares=(6, 2))
    assert executed_by(some) == (0, 0, 0, 1, 0, 0, 0, 1)
    assert numbers_of(some, 1) == (5, 7)
    assert sorted(numbers_of(some, 0) + numbers_of(some, 1)) == list(range(8))
    assert most_parts(some) == 6
