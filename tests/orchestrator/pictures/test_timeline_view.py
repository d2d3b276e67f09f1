"""A timeline's data for a page: every action at its time, frozen shares, memory and the critical path."""

from __future__ import annotations

import json
from typing import Any

import pytest
from report_page import times, tokens
from small_profile import layer, plan, profile

from orchestrator.pictures.timeline_svg import Step
from orchestrator.pictures.timeline_view import FEWEST_TICKS, TICKS_PER_ACTION, TimelineView
from planner.schedule.registry import build
from planner.simulation.predict import predict
from planner.simulation.simulate import Costs, simulate

UNIT = Costs.uniform(forward_s=0.001, input_grad_s=0.001, weight_grad_s=0.001)


def data(*steps: Step) -> dict[str, Any]:
    """What a page receives."""
    return json.loads(json.dumps(TimelineView("", steps).data, allow_nan=False))


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zbv"])
def test_every_action_is_there_at_its_time(schedule: str) -> None:
    timeline = simulate(build(schedule, 3, 6), UNIT).timeline
    seen = data(Step("measured", timeline, None), Step("predicted", timeline, 0.1))
    assert [group["name"] for group in seen["groups"]] == ["measured", "predicted"]
    assert (seen["unit"], seen["end"]) == ("ms", FEWEST_TICKS)
    assert seen["scale"] * FEWEST_TICKS == pytest.approx(100)
    assert seen["groups"][1]["end"] == FEWEST_TICKS
    assert {kind for lane in seen["groups"][0]["lanes"] for kind in lane["kinds"]} == seen["kinds"].keys()
    for group in seen["groups"]:
        for lane, spans in zip(group["lanes"], timeline, strict=True):
            assert tokens(lane) == [str(span.action) for span in spans]
            for (start, end), span in zip(times(seen, lane), spans, strict=True):
                assert (start, end) == pytest.approx((1e3 * span.start_s, 1e3 * span.end_s), abs=2e-3)


def test_a_tick_is_a_thousandth_of_a_mean_action_at_most() -> None:
    timeline = simulate(build("1f1b", 2, 160), UNIT).timeline
    seen = data(Step("", timeline, None))
    assert seen["end"] == 320 * TICKS_PER_ACTION
    lane = seen["groups"][0]["lanes"][0]
    lengths = [length for _, length in zip(lane["times"][::2], lane["times"][1::2], strict=True)]
    assert min(lengths) > 0.6 * TICKS_PER_ACTION


def test_microbatches_that_count_up_are_not_listed() -> None:
    timeline = [list(spans) for spans in simulate(build("1f1b", 2, 4), UNIT).timeline]
    timeline.append(timeline[0][1:])
    lanes = data(Step("", timeline, None))["groups"][0]["lanes"]
    assert [lane["indices"] is None for lane in lanes] == [True, True, False]
    assert [tokens(lane) for lane in lanes] == [[str(span.action) for span in spans] for spans in timeline]


def test_frozen_shares_and_the_critical_path_name_actions_by_number() -> None:
    timeline = simulate(build("1f1b", 2, 2), UNIT).timeline
    seen = data(Step("", timeline, None, [(1, 0, 0.25)], critical=[(1, 3), (0, 0), (1, 1)]))
    first, second = seen["groups"][0]["lanes"]
    assert (first["critical"], second["critical"]) == ([0], [1, 3])
    assert (first["frozen"], second["frozen"]) == ({}, {"1": 0.25})


def test_memory_is_stacked_to_the_largest_of_all_ranks() -> None:
    foreseen = predict(
        profile(layer(activation_bytes=3000), layer(weight_grad_hold_bytes=700)),
        plan(1, 1, schedule="zb-h1"),
        build("zb-h1", 2, 2),
    )
    seen = data(Step("", foreseen.simulation.timeline, None, memory=foreseen.memory_over_time()))
    tops = [max(sum(level[1:]) for level in lane["memory"]["levels"]) for lane in seen["groups"][0]["lanes"]]
    most = max(foreseen.memory.peak_bytes)
    assert tops == pytest.approx([1000 * peak / most for peak in foreseen.memory.peak_bytes], abs=0.5)
    assert all(
        len(level) == 1 + len(seen["uses"])
        for lane in seen["groups"][0]["lanes"]
        for level in lane["memory"]["levels"]
    )


def test_words_tell_what_the_picture_shows() -> None:
    timeline = simulate(build("1f1b", 2, 2), UNIT).timeline
    assert TimelineView("1f1b", [Step("measured", timeline, 0.012)]).words == (
        "1f1b. measured: 8 actions on 2 ranks in 12 ms; computing rank 0 50 %, rank 1 50 %."
    )


@pytest.mark.parametrize("timeline", [[], [[]], [[], []]])
def test_a_step_without_actions_has_data_too(timeline: list[list[Any]]) -> None:
    seen = data(Step("", timeline, None))
    assert [lane["times"] for lane in seen["groups"][0]["lanes"]] == [[] for _ in timeline]
