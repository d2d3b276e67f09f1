"""Costs from spans: exact times are recovered exactly, whatever the offsets of the ranks' clocks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.freeze.monitoring import MonitoringError, Observation, complete, measure
from planner.freezing import Phases
from planner.ir import ActionKind, Schedule
from planner.schedule import registry
from planner.simulation.simulate import Costs, simulate

PHASES = Phases(warm_up=2, monitoring=6, ramp=9)
OUTSIDE_S = 0.5
FAMILIES = [("gpipe", 3), ("1f1b", 3), ("interleaved", 2), ("zb-h1", 3), ("zbv", 2)]


def costs(schedule: Schedule, weight_grad_s: float) -> Costs:
    """Costs that differ between all stages."""
    stages = range(schedule.stages)
    return Costs(
        {
            ActionKind.FORWARD: tuple(1.0 + stage for stage in stages),
            ActionKind.INPUT_GRAD: tuple(2.0 + stage for stage in stages),
            ActionKind.WEIGHT_GRAD: tuple(weight_grad_s + stage * weight_grad_s for stage in stages),
            ActionKind.BACKWARD: tuple(2.0 + stage + weight_grad_s * (1 + stage) for stage in stages),
        },
        0.25,
    )


def step(schedule: Schedule, number: int, given: Costs, *, replica: int = 0) -> list[Observation]:
    """The ranks' reports about one step; each rank's clock has a different offset."""
    laid_out = simulate(schedule, given)
    return [
        Observation(
            step=number,
            rank=replica * schedule.ranks + rank,
            step_s=laid_out.makespan_s + OUTSIDE_S - rank / 8,
            spans=tuple(
                (str(timed.action), timed.start_s - rank / 8, timed.end_s - rank / 8) for timed in line
            ),
        )
        for rank, line in enumerate(laid_out.timeline)
    ]


def monitored(schedule: Schedule) -> list[Observation]:
    upper, lower = costs(schedule, 3.0), costs(schedule, 0.0)
    return [
        seen
        for number in range(1, 10)
        for seen in step(schedule, number, lower if 4 < number <= 6 else upper)
    ]


@pytest.mark.parametrize(("family", "ranks"), FAMILIES)
def test_exact_times_are_recovered_and_predict_the_steps(family: str, ranks: int) -> None:
    schedule = registry.build(family, ranks, 6, None)
    bounds = measure(schedule, PHASES, monitored(schedule))
    for found, given in ((bounds.upper, costs(schedule, 3.0)), (bounds.lower, costs(schedule, 0.0))):
        for program in schedule.programs:
            for action in program:
                assert found.of_action(action) == pytest.approx(given.of_action(action))
        assert found.communication_s == pytest.approx(0.25)
        assert simulate(schedule, found).makespan_s == pytest.approx(simulate(schedule, given).makespan_s)
    assert bounds.outside_s == pytest.approx(OUTSIDE_S)
    assert bounds.upper_step_s == pytest.approx(simulate(schedule, bounds.upper).makespan_s + OUTSIDE_S)
    assert bounds.lower_step_s == pytest.approx(simulate(schedule, bounds.lower).makespan_s + OUTSIDE_S)


def slowed(observation: Observation, factor: float) -> Observation:
    return replace(
        observation,
        spans=tuple(
            (token, start_s, start_s + factor * (end_s - start_s))
            for token, start_s, end_s in observation.spans
        ),
    )


def test_one_disturbed_step_changes_nothing() -> None:
    schedule = registry.build("1f1b", 2, 4, None)
    phases = Phases(warm_up=0, monitoring=6, ramp=9)
    upper, lower = costs(schedule, 3.0), costs(schedule, 1.0)
    calm = [
        seen for number in range(1, 7) for seen in step(schedule, number, upper if number <= 3 else lower)
    ]
    disturbed = [slowed(seen, 10.0) if seen.step in (1, 5) else seen for seen in calm]
    assert measure(schedule, phases, disturbed).upper.seconds == measure(schedule, phases, calm).upper.seconds
    assert measure(schedule, phases, disturbed).lower.seconds == measure(schedule, phases, calm).lower.seconds


def test_frozen_actions_are_never_the_longer_ones() -> None:
    schedule = registry.build("1f1b", 2, 4, None)
    seen = [slowed(each, 3.0) if 4 < each.step <= 6 else each for each in monitored(schedule)]
    bounds = measure(schedule, PHASES, seen)
    backward = ActionKind.BACKWARD
    assert bounds.lower.seconds[backward] == bounds.upper.seconds[backward]


def test_what_comes_before_the_first_action_is_outside_the_window() -> None:
    schedule = registry.build("1f1b", 2, 4, None)
    seen = [
        replace(
            each,
            step_s=each.step_s + 2.0,
            spans=tuple((token, start_s + 2.0, end_s + 2.0) for token, start_s, end_s in each.spans),
        )
        for each in monitored(schedule)
    ]
    assert measure(schedule, PHASES, seen).outside_s == pytest.approx(OUTSIDE_S + 2.0)


def test_replicas_count_equally() -> None:
    schedule = registry.build("1f1b", 2, 4, None)
    first = monitored(schedule)
    sibling = [slowed(replace(each, rank=each.rank + 2), 2.0) for each in first]
    bounds = measure(schedule, PHASES, first + sibling)
    assert bounds.upper.seconds[ActionKind.FORWARD] == pytest.approx((1.5, 3.0))


def test_weight_gradients_without_a_measured_time_take_no_time() -> None:
    schedule = registry.build("zb-h1", 2, 4, None)
    seen = [
        replace(each, spans=tuple(span for span in each.spans if "W" not in span[0]))
        if each.step > 4
        else each
        for each in monitored(schedule)
    ]
    assert measure(schedule, PHASES, seen).lower.seconds[ActionKind.WEIGHT_GRAD] == (0.0, 0.0)


def test_a_missing_time_is_named() -> None:
    schedule = registry.build("1f1b", 2, 4, None)
    seen = monitored(schedule)
    with pytest.raises(
        MonitoringError, match=r"how long B of stage 0 takes in the monitored steps 5 to 6 \(lower"
    ):
        measure(schedule, PHASES, [each for each in seen if each.step <= 4])
    with pytest.raises(
        MonitoringError, match=r"B of stage 1 takes in the monitored steps 3 to 4 \(upper bound\)"
    ):
        measure(schedule, PHASES, [each for each in seen if each.step > 4 or each.rank == 0])


def test_monitoring_is_complete_with_the_last_step_of_every_rank() -> None:
    schedule = registry.build("1f1b", 2, 4, None)
    seen = [each for each in monitored(schedule) if each.step <= 6]
    assert complete(seen, PHASES, 2)
    assert not complete(seen[:-1], PHASES, 2)
    assert not complete(seen, PHASES, 4)
