"""Shares for pipelines of unlike speed."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from small_profile import layer, plan, profile

from planner.plan import Plan, PlanError
from planner.profile import Link, Profile
from planner.schedule.expand import schedule_of, schedule_of_pipeline
from planner.schedule.validate import ScheduleError
from planner.search.balanced_shares import balanced_shares, towards_balance
from planner.search.replan import Replanner
from planner.simulation.costs import action_costs
from planner.simulation.monte_carlo import step_seconds
from planner.simulation.predict import predict
from planner.simulation.simulate import simulate


def slowed(*slowdowns: float, memory_bytes: int = 10**9, link: Link | None = None) -> Profile:
    """Two layers, and devices with these slowdowns."""
    made = profile(layer(), layer(), ranks=len(slowdowns), **({} if link is None else {"link": link}))
    devices = [
        replace(device, slowdown=slowdown, memory_bytes=memory_bytes)
        for device, slowdown in zip(made.cluster.devices, slowdowns, strict=True)
    ]
    return replace(made, cluster=replace(made.cluster, devices=tuple(devices)))


def pipelines(count: int, microbatches: int = 8, **changes: Any) -> Plan:
    """Two stages in each pipeline."""
    return plan(1, 1, microbatches=microbatches, replicas=count, **changes)


def windows_s(known: Profile, given: Plan) -> float:
    return predict(known, given, schedule_of(given)).windows_s


def test_the_step_with_shares_is_that_of_the_slowest_pipeline() -> None:
    known, uneven = slowed(1, 1, 2, 2), pipelines(2, shares=(10, 6))
    found = predict(known, uneven, schedule_of(uneven))
    # (n + P - 1)(F + B), F + B = 7, twice that on the second pipeline.
    assert [run.whole.makespan_s for run in found.runs] == [7 * 11, 2 * 7 * 7]
    assert found.windows_s == 98
    assert found.simulation.schedule.microbatches == 6
    assert windows_s(known, replace(uneven, shares=())) == 2 * 7 * 9


def test_one_straggler_slows_only_its_own_pipeline() -> None:
    uneven = pipelines(2, shares=(10, 6))
    both = predict(slowed(1, 1, 2, 2), uneven, schedule_of(uneven)).runs
    one = predict(slowed(1, 1, 2, 1), uneven, schedule_of(uneven)).runs
    assert both[0].whole.makespan_s == one[0].whole.makespan_s
    assert one[1].whole.makespan_s < both[1].whole.makespan_s


def test_even_shares_that_are_named_cost_what_even_ones_cost() -> None:
    known, even = slowed(1, 1, 2, 2), pipelines(2)
    named = replace(even, shares=(8, 8))
    assert windows_s(known, named) == windows_s(known, even)
    assert predict(known, named, schedule_of(even)).memory.peak_bytes == (
        predict(known, even, schedule_of(even)).memory.peak_bytes
    )


@pytest.mark.parametrize("slowdowns", [(1.0, 1.8), (1.0, 3.2), (1.02, 1.0), (1.0, 1.8, 3.2), (2.0, 1.0, 1.0)])
def test_no_other_shares_make_shorter_windows(slowdowns: tuple[float, ...]) -> None:
    known = slowed(*(slowdown for slowdown in slowdowns for _ in range(2)))
    even = pipelines(len(slowdowns), microbatches=6)
    total = even.replicas * even.microbatches
    cuts = itertools.combinations(range(1, total), len(slowdowns) - 1)
    splits = [tuple(b - a for a, b in itertools.pairwise((0, *cut, total))) for cut in cuts]
    least_s = min(windows_s(known, replace(even, shares=shares)) for shares in splits)
    found = balanced_shares(known, even, schedule_of(even), judged=total)
    assert found.windows_s == pytest.approx(least_s)
    even_s = predict(known, even, schedule_of(even)).step_s
    assert found.step_s < even_s if found.plan.shares else found.step_s == even_s


def test_equal_pipelines_have_no_shares() -> None:
    even = pipelines(2)
    assert towards_balance(slowed(1, 1, 1, 1), even, schedule_of(even)) == ()
    assert balanced_shares(slowed(1, 1, 1, 1), even, schedule_of(even)).plan == even
    alone = plan(1, 1, microbatches=8)
    assert towards_balance(slowed(1, 3), alone, schedule_of(alone)) == ()


def test_microbatches_do_not_move_where_their_gradients_cost_more_than_they_save() -> None:
    even = pipelines(2)
    # The gradients of a layer take half a minute: each part that is kept apart costs more than a microbatch.
    slow_link = Link(latency_s=0.0, bytes_per_s=1.0)
    assert balanced_shares(slowed(1, 1, 1.2, 1.2, link=slow_link), even, schedule_of(even)).plan == even
    assert balanced_shares(slowed(1, 1, 1.2, 1.2), even, schedule_of(even)).plan.shares == (9, 7)


def test_gradients_that_are_kept_apart_count_as_memory() -> None:
    known, uneven = slowed(1, 1, 2, 2), pipelines(2, shares=(10, 6))
    found = predict(known, uneven, schedule_of(uneven))
    even = predict(known, replace(uneven, shares=()), schedule_of(uneven))
    # Two microbatches of the sibling's replica, 30 bytes of gradients each.
    assert [rank.peak.gradients for rank in found.memory.ranks] == [
        2 * 30 + rank.peak.gradients for rank in even.memory.ranks
    ]
    tight = slowed(1, 1, 2, 2, memory_bytes=max(even.memory.peak_bytes))
    assert balanced_shares(tight, replace(uneven, shares=()), schedule_of(uneven)).plan.shares == ()


def test_rounds_of_the_interleaved_schedule_stay_whole() -> None:
    known = replace(slowed(1, 1, 2, 2), model=profile(*[layer()] * 4).model)
    even = plan(1, 1, 1, 1, schedule="interleaved", chunks=2, microbatches=8, replicas=2)
    rounds = [(first, 16 - first) for first in range(2, 16, 2)]
    best = min(rounds, key=lambda shares: windows_s(known, replace(even, shares=shares)))
    assert balanced_shares(known, even, schedule_of(even)).plan.shares == best != (8, 8)
    with pytest.raises(ScheduleError, match="needs a multiple of the ranks"):
        schedule_of_pipeline(replace(even, shares=(9, 7)), schedule_of(even), 0)


def test_a_table_of_the_users_own_has_no_shares() -> None:
    own = replace(pipelines(2), schedule="csv:own.csv")
    table = schedule_of(pipelines(2))
    assert towards_balance(slowed(1, 1, 2, 2), own, table) == ()
    with pytest.raises(ScheduleError, match="is a table for 8 microbatches"):
        schedule_of_pipeline(replace(own, shares=(10, 6)), table, 0)


def test_freeze_ratios_follow_their_microbatches() -> None:
    known, uneven = slowed(1, 1, 2, 2), pipelines(2, shares=(10, 6))
    ratios = tuple((0.0,) * 6 + (1.0, 1.0) for _ in range(2))
    found = predict(known, uneven, schedule_of(uneven), ratios)
    # Pipeline 0 has microbatches 6 and 7 of both replicas, pipeline 1 neither.
    for run, frozen in zip(found.runs, (4, 0), strict=True):
        window = schedule_of_pipeline(uneven, schedule_of(uneven), run.pipeline or 0)
        whole = simulate(window, action_costs(known, uneven, window, pipeline=run.pipeline))
        slowdown = 1 + (run.pipeline or 0)
        assert [before - after for before, after in zip(whole.busy_s, run.whole.busy_s, strict=True)] == [
            slowdown * frozen * 4.0
        ] * 2
    sampled = step_seconds(known, uneven, schedule_of(uneven), ratios, samples=3, seed=0)
    assert sampled == pytest.approx([found.step_s] * 3)


def replanner(known: Profile, now: Plan, **changes: Any) -> Replanner:
    return Replanner(
        first=now, schedule=schedule_of(now), parameters=(10, 10), copies=0, profile=known, **changes
    )


def test_a_running_job_gets_shares_for_the_speeds_that_are_known() -> None:
    now = pipelines(2)
    planner = replanner(slowed(1, 1, 1, 1), now)
    assert planner.with_shares(now, "abcd", (1.0, 1.0, 3.0, 1.0)).shares == (12, 4)
    assert planner.with_shares(replace(now, shares=(12, 4)), "abcd", (1.0,) * 4) == now
    uneven, schedule = planner.checked(replace(now, shares=(12, 4)), "abcd", (1.0, 1.0, 3.0, 1.0))
    even, _ = planner.checked(now, "abcd", (1.0, 1.0, 3.0, 1.0))
    assert schedule == schedule_of(now)
    assert uneven.predicted_step_s is not None
    assert even.predicted_step_s is not None
    assert uneven.predicted_step_s < 0.7 * even.predicted_step_s
    with pytest.raises(PlanError, match="they add up to 17"):
        planner.checked(replace(now, shares=(12, 5)), "abcd")


def test_replicas_that_cannot_be_divided_stay_whole() -> None:
    now = pipelines(2)
    whole = replanner(slowed(1, 1, 1, 1), now, divisible=False)
    assert whole.with_shares(now, "abcd", (1.0, 1.0, 3.0, 1.0)) == now
    with pytest.raises(PlanError, match="the model has buffers"):
        whole.checked(replace(now, shares=(12, 4)), "abcd")
