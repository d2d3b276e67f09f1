"""What copies save on a trace: groups of nodes that go at one time, against the plans for the nodes that are there."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.rehearsal.copies_saved import GroupLoss, copies_saved, group_losses, steps_lost
from orchestrator.rehearsal.synthetic_trace import Preemption, synthetic
from orchestrator.rehearsal.traces import NodeChange, NodeChangeKind, NodeTrace
from planner.plan import Plan
from planner.schedule.expand import schedule_of
from planner.search.replan import Replanner


def replanner(ranks: int, copies: int = 1, layers: int = 12) -> Replanner:
    cuts = [rank * layers // ranks for rank in range(ranks + 1)]
    plan = Plan(
        epoch=1,
        version=1,
        reason="first",
        layers=tuple(pairwise(cuts)),
        stage_ranks=tuple(range(ranks)),
        schedule="1f1b",
        chunks=1,
        microbatches=4,
        replicas=1,
    )
    return Replanner(first=plan, schedule=schedule_of(plan), parameters=(1,) * layers, copies=copies)


def trace(*changes: tuple[int, str, str]) -> NodeTrace:
    """Of (second, `+` or `-`, nodes by their letters)."""
    return NodeTrace(
        changes=tuple(
            NodeChange(
                time_ms=1000 * second,
                kind=NodeChangeKind.ADD if sign == "+" else NodeChangeKind.REMOVE,
                node=node,
            )
            for second, sign, nodes in changes
            for node in nodes
        ),
        end_ms=1000 * changes[-1][0],
    )


def test_an_owner_that_goes_with_its_only_copy_costs_the_steps_since_the_checkpoint() -> None:
    # Six ranks of two layers: the first two keep copies of each other's layers.
    gone = trace((0, "+", "abcdef"), (100, "-", "ab"))
    found = copies_saved(gone, replanner(6), steps_per_s=1.0, every_steps=30)
    assert [(each.copies, each.losses, each.last_holders) for each in found] == [
        (0, 1, 1),
        (1, 1, 1),
        (2, 1, 0),
    ]
    assert [each.steps_lost for each in found] == [10, 10, 0]


def test_nodes_that_go_one_after_the_other_cost_nothing_with_one_copy() -> None:
    gone = trace((0, "+", "abcdef"), (100, "-", "a"), (200, "-", "b"), (300, "-", "c"))
    assert [loss.last for loss in group_losses(gone, replanner(6))] == [False] * 3
    assert [loss.last for loss in group_losses(gone, replanner(6, copies=0))] == [True] * 3


def test_whoever_has_no_place_is_no_loss_and_fills_a_gap() -> None:
    gone = trace((0, "+", "abcd"), (5, "-", "d"), (10, "+", "e"), (20, "-", "a"), (30, "-", "bc"))
    losses = group_losses(gone, replanner(3))
    # d was a spare; e takes a's place, so three ranks train when b and c go.
    assert [loss.nodes for loss in losses] == [("a",), ("b", "c")]
    assert losses[1].last


def test_all_nodes_at_once_spare_nobody() -> None:
    gone = trace((0, "+", "abc"), (9, "-", "abc"))
    (loss,) = group_losses(gone, replanner(3, copies=2))
    assert loss.last


def test_a_step_is_lost_once_for_each_time_that_it_is_undone() -> None:
    losses = [GroupLoss(25_000, ("a",), 2, last=True), GroupLoss(31_000, ("b",), 2, last=True)]
    # 25 -> 20; six more steps -> 26 -> 20.
    assert steps_lost(losses, steps_per_s=1.0, every_steps=10) == 11
    # Without checkpoints each of them starts over.
    assert steps_lost(losses, steps_per_s=1.0, every_steps=0) == 31
    assert steps_lost(losses, steps_per_s=1.0, every_steps=10, first_step=7) == 2 + 6


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.integers(3, 8))
def test_as_many_nodes_as_copies_never_take_the_last_holder(seed: int, ranks: int) -> None:
    made = synthetic(ranks + 1, Preemption(probability=0.3, every_min=10.0, back_min=20.0), 200.0, seed)
    for copies in (0, 1, 2):
        for loss in group_losses(made, replanner(ranks, copies)):
            assert len(loss.nodes) <= loss.ranks <= ranks
            if len(loss.nodes) <= copies < loss.ranks:
                assert not loss.last
            if len(loss.nodes) == loss.ranks or not copies:
                assert loss.last


@pytest.mark.parametrize("copies", [2, 3])
def test_as_many_copies_are_compared_as_the_job_has(copies: int) -> None:
    found = copies_saved(
        trace((0, "+", "abcd"), (9, "-", "a")), replanner(4, copies), steps_per_s=1.0, every_steps=1
    )
    assert [each.copies for each in found] == list(range(copies + 1))
