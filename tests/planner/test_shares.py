"""Which pipeline executes which microbatches with uneven shares, and in which parts gradients are summed."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from small_profile import plan

from planner.codec import from_json, to_json
from planner.plan import Plan, PlanError
from planner.shares import ReplicaPart, check_shares, most_parts, numbers_of, parts, parts_of


def test_the_first_microbatches_of_a_replica_are_one_part_and_those_given_away_one_each() -> None:
    uneven = plan(1, 1, microbatches=8, replicas=2, shares=(10, 6))
    assert parts(uneven) == (
        ReplicaPart(0, 0, 8, 0),
        ReplicaPart(1, 0, 6, 1),
        ReplicaPart(1, 6, 7, 0),
        ReplicaPart(1, 7, 8, 0),
    )
    assert numbers_of(uneven, 0) == (*range(8), 14, 15)
    assert numbers_of(uneven, 1) == tuple(range(8, 14))
    assert most_parts(uneven) == 3


def test_who_executes_most_of_a_replica_takes_its_first_microbatches() -> None:
    uneven = plan(1, 1, microbatches=8, replicas=2, shares=(3, 13))
    assert parts_of(uneven, 1) == (ReplicaPart(0, 0, 5, 1), ReplicaPart(1, 0, 8, 1))
    assert numbers_of(uneven, 0) == (5, 6, 7)
    assert most_parts(uneven) == 3


def test_without_shares_each_replica_is_one_part() -> None:
    even = plan(1, 1, microbatches=2, replicas=3, pipelines=2)
    assert parts(even) == (ReplicaPart(0, 0, 2, 0), ReplicaPart(1, 0, 2, 1), ReplicaPart(2, 0, 2, 0))
    assert most_parts(even) == 2


def test_replicas_that_change_pipelines_whole_stay_whole() -> None:
    uneven = plan(1, 1, microbatches=2, replicas=4, pipelines=2, shares=(6, 2))
    assert parts(uneven) == (
        ReplicaPart(0, 0, 2, 0),
        ReplicaPart(1, 0, 2, 1),
        ReplicaPart(2, 0, 2, 0),
        ReplicaPart(3, 0, 2, 0),
    )


def test_every_microbatch_is_executed_once_and_each_replica_summed_in_order() -> None:
    draws = random.Random(0)
    for _ in range(300):
        pipelines = draws.randint(1, 4)
        replicas, microbatches = draws.randint(pipelines, 6), draws.randint(1, 6)
        total = replicas * microbatches
        cuts = sorted(draws.sample(range(1, total), pipelines - 1))
        shares = tuple(b - a for a, b in itertools.pairwise((0, *cuts, total)))
        uneven = plan(1, 1, microbatches=microbatches, replicas=replicas, pipelines=pipelines, shares=shares)
        check_shares(uneven)
        numbers = [numbers_of(uneven, pipeline) for pipeline in range(pipelines)]
        assert tuple(map(len, numbers)) == shares
        assert sorted(g for own in numbers for g in own) == list(range(total))
        in_order = [g for part in parts(uneven) for g in part.numbers(microbatches)]
        assert in_order == list(range(total))
        # Only one microbatch beside the first run: adding it later is adding it in its turn.
        assert all(part.first == 0 or part.stop - part.first == 1 for part in parts(uneven))


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ((4,), r"shares \[4\] are for 1 pipelines, the plan has 2"),
        ((4, 0), "at least 1 each and add up to 4"),
        ((3, 2), "they add up to 5"),
    ],
)
def test_shares_that_do_not_cover_a_step_are_refused(shares: tuple[int, ...], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        check_shares(plan(1, 1, microbatches=2, replicas=2, shares=shares))


def test_shares_survive_json_and_plans_from_before_have_none() -> None:
    uneven = plan(1, 1, microbatches=2, replicas=2, shares=(3, 1))
    assert from_json(Plan, to_json(uneven)) == uneven
    before = to_json(uneven).replace(b',"shares":[3,1]', b"")
    assert b"shares" not in before
    assert from_json(Plan, before) == replace(uneven, shares=())
