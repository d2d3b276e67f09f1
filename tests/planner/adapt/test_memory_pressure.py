"""Plans keep within what ranks turned out to have: fewer layers there, or layers that recompute; else words."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_profile import DEVICE, layer, plan, profile

from planner.adapt.memory_pressure import limit_after_failure, limit_after_fall, relieve
from planner.plan import Plan, PlanError
from planner.schedule.expand import schedule_of
from planner.search.recut import predicted
from planner.search.replan import Replanner
from planner.simulation.predict import Prediction

LAYERS = 8
PLACES = ("",) * 4


def replanner(first: Plan | None = None, memory_bytes: int = 10_000) -> Replanner:
    first = first or plan(2, 2, 2, 2, microbatches=4, partition="dynpipe")
    layers = [layer(f"layer{number}") for number in range(LAYERS)]
    device = replace(DEVICE, memory_bytes=memory_bytes)
    return Replanner(
        first=first,
        schedule=schedule_of(first),
        parameters=(10,) * LAYERS,
        copies=0,
        profile=profile(*layers, ranks=4, device=device),
    )


def planned(planner: Replanner, *limits: int | None, places: int = 4) -> Prediction:
    limited = replace(planner, limits=limits)
    found, schedule = limited.plan_for(places, epoch=1, version=2, reason="", domains=PLACES[:places])
    assert schedule == schedule_of(found)
    prediction = predicted(limited, found, PLACES[:places])
    assert prediction is not None
    if found.layers != planner.first.layers or found.recompute:
        assert found.predicted_step_s == prediction.step_s
        assert found.predicted_peak_memory_bytes == prediction.peak_memory_bytes
    return prediction


def peaks(planner: Replanner) -> tuple[int, ...]:
    prediction = predicted(planner, planner.first, PLACES)
    assert prediction is not None
    return prediction.memory.peak_bytes


def test_a_limited_place_gets_less_and_the_others_more() -> None:
    planner = replanner()
    limit = int(0.9 * peaks(planner)[0])
    found = planned(planner, limit)
    assert found.memory.peak_bytes[0] <= limit < peaks(planner)[0]
    assert len(found.plan.layers_of_place(0)) < 2 or found.plan.recompute
    assert found.plan.world_size == 4


def test_no_limit_changes_nothing() -> None:
    planner = replanner()
    assert planned(planner, None, None).plan.layers == planner.first.layers
    assert planned(planner, 10_000).plan.layers == planner.first.layers


def test_where_no_cut_fits_layers_recompute_as_few_as_are_needed() -> None:
    planner = replanner(memory_bytes=max(peaks(replanner())))
    limit = int(0.5 * peaks(planner)[0])
    found = planned(planner, limit)
    assert found.fits
    again = found.plan.recompute
    assert again, "the devices hold no more layers than they have"
    without = [
        replace(found.plan, recompute=tuple(number for number in again if not first <= number < stop))
        for first, stop in found.plan.layers
        if any(first <= number < stop for number in again)
    ]
    for leaner in without:
        prediction = predicted(replace(planner, limits=(limit,)), leaner, PLACES)
        assert prediction is not None
        assert not prediction.fits


def test_a_slower_cut_is_not_preferred_to_recomputation() -> None:
    """One rank that recomputes is faster here than another one that has five layers."""
    planner = replanner()
    cut_alone = planned(planner, 500).step_s
    assert cut_alone < 1.5 * (predicted(planner, planner.first, PLACES) or pytest.fail("no profile")).step_s


def test_the_smallest_sibling_limits_all_pipelines() -> None:
    first = plan(4, 4, microbatches=4, replicas=2, partition="dynpipe")
    planner = replanner(first)
    second_pipelines_first = 2
    limit = int(0.9 * peaks(planner)[0])
    limits = tuple(limit if place == second_pipelines_first else None for place in range(4))
    assert planned(planner, *limits).memory.peak_bytes[0] <= limit
    assert planned(planner, None, None, None).plan.layers == first.layers


def test_if_nothing_fits_the_numbers_are_in_the_error() -> None:
    with pytest.raises(
        PlanError, match=r"no plan for 4 ranks: nothing fits the memory.* more than the 100 it may use"
    ):
        planned(replanner(memory_bytes=max(peaks(replanner()))), 100, 100, 100, 100)


def test_a_failure_leaves_what_the_rank_held_or_less_than_was_predicted() -> None:
    planner = replanner()
    peak = peaks(planner)[1]
    assert limit_after_failure(planner, planner.first, 1, None) == int(0.95 * peak)
    assert limit_after_failure(planner, planner.first, 1, 400) == 380
    assert limit_after_failure(planner, planner.first, 1, 10 * peak) == int(0.95 * peak)
    assert limit_after_failure(replace(planner, profile=None), planner.first, 1, 400) is None


def test_a_fall_leaves_what_the_plan_takes_without_what_is_lacking() -> None:
    planner = replanner()
    assert limit_after_fall(planner, planner.first, 1, 100) == peaks(planner)[1] - 100
    assert limit_after_fall(planner, planner.first, 1, 10**9) == 1
    assert limit_after_fall(replace(planner, profile=None), planner.first, 1, 100) is None


def test_relief_is_the_fastest_cut_within_the_limits_or_none_with_the_numbers() -> None:
    planner = replanner()
    limit = int(0.8 * peaks(planner)[1])
    limited = replace(planner, limits=(None, limit))
    found, why = relieve(limited, planner.first, PLACES, (None,) * 4)
    assert found is not None
    assert found.layers_per_stage[1] == 1
    assert found.stage_ranks == planner.first.stage_ranks
    assert f"place 1 has less memory than it takes: {peaks(planner)[1]:,} -> " in why
    assert relieve(planner, planner.first, PLACES, (None,) * 4)[0] is None
    none, why = relieve(replace(planner, limits=(10,) * 4), planner.first, PLACES, (None,) * 4)
    assert none is None
    assert "more than the 10 it may use" in why


def test_on_the_way_a_place_may_take_what_it_takes_now() -> None:
    planner = replanner()
    limited = replace(planner, limits=(None, int(0.8 * peaks(planner)[1])))
    with pytest.raises(PlanError, match="place 1 would need"):
        limited.check_memory(planner.first, PLACES)
    limited.check_memory(planner.first, PLACES, planner.first)
