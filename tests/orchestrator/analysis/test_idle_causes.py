"""Idle time by cause and the critical path: each cause alone, and that parts add up whatever a step looks like."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.analysis.idle_causes import IdleCauses, IdleTime, idle_causes
from planner.ir import Action, ActionKind, Schedule
from planner.schedule.passes import repeat
from planner.schedule.registry import build
from planner.simulation.simulate import Costs, TimedAction, simulate

SECOND = 1_000_000_000
UNIT = Costs.uniform(forward_s=1, input_grad_s=1, weight_grad_s=1)


def causes(rank: IdleTime) -> dict[str, float]:
    """Seconds of each cause that there is."""
    parts = {
        "dependency": rank.dependency_ns,
        "imbalance": rank.imbalance_ns,
        "communication": rank.communication_ns,
        "straggler": rank.straggler_ns,
    }
    return {name: part / SECOND for name, part in parts.items() if part}


def ran(schedule: Schedule, costs: Costs) -> tuple[tuple[TimedAction, ...], ...]:
    return simulate(schedule, costs).timeline


def expected(schedule: Schedule, costs: Costs) -> list[list[float]]:
    return [[costs.of_action(action) for action in program] for program in schedule.programs]


def tokens(schedule: Schedule, found: IdleCauses) -> list[str]:
    return [str(schedule.programs[rank][number]) for rank, number in found.critical.spans]


def test_equal_stages_on_time_wait_only_for_the_pipeline_to_fill_and_drain() -> None:
    schedule = build("gpipe", 2, 2)
    found = idle_causes(schedule, ran(schedule, UNIT))
    assert [causes(rank) for rank in found.ranks] == [{"dependency": 3.0}, {"dependency": 3.0}]
    assert found.window_ns == 9 * SECOND
    assert tokens(schedule, found) == ["0F0", "1F0", "1F1", "1B0", "0B0", "0B1"]
    assert (found.critical.computing_ns, found.critical.message_ns) == (9 * SECOND, 0)


def test_a_rank_with_a_shorter_stage_waits_for_the_difference() -> None:
    schedule = build("gpipe", 2, 2)
    forward, backward = (1.0, 3.0), (2.0, 6.0)
    found = idle_causes(
        schedule, ran(schedule, Costs({ActionKind.FORWARD: forward, ActionKind.BACKWARD: backward}))
    )
    # Rank 0 computes 6 of 21 s. It waits for 1F0 to 1F1, 1B0 and 1B1, each three times as long as its own: of the
    # 5 s of forwards and the 12 s of backwards, two thirds, while 2 s are not waited for as it computes 0B0.
    first, second = found.ranks
    assert found.window_ns == 21 * SECOND
    assert causes(first) == pytest.approx({"imbalance": 10.0, "dependency": 5.0})
    assert causes(second) == {"dependency": 3.0}
    assert tokens(schedule, found) == ["0F0", "1F0", "1F1", "1B0", "1B1", "0B1"]


def test_time_in_which_a_message_is_in_flight_is_communication() -> None:
    schedule = build("gpipe", 2, 1)
    found = idle_causes(schedule, ran(schedule, replace(UNIT, communication_s=0.5)))
    assert causes(found.ranks[0]) == {"dependency": 3.0, "communication": 1.0}
    assert causes(found.ranks[1]) == {"dependency": 3.0, "communication": 1.0}
    assert found.critical.message_ns == SECOND
    assert found.critical.computing_ns == 6 * SECOND


def test_a_rank_slower_than_expected_is_a_straggler_to_the_others_only() -> None:
    schedule = build("1f1b", 3, 3)
    slow = replace(UNIT, actions={Action(ActionKind.BACKWARD, 1, index): 2.5 for index in range(3)})
    found = idle_causes(schedule, ran(schedule, slow), expected(schedule, UNIT))
    late = [causes(rank).get("straggler", 0.0) for rank in found.ranks]
    assert late == [1.0, 0.0, 0.5]
    assert all("imbalance" not in causes(rank) for rank in found.ranks)


def test_a_machine_that_is_slower_as_a_whole_has_no_straggler() -> None:
    schedule = build("zb-h1", 4, 8)
    twice = Costs.uniform(forward_s=2, input_grad_s=2, weight_grad_s=2)
    found = idle_causes(schedule, ran(schedule, twice), expected(schedule, UNIT))
    assert all(set(causes(rank)) == {"dependency"} for rank in found.ranks)


def test_a_hiccup_without_anything_missing_is_a_straggler() -> None:
    schedule = build("gpipe", 1, 2)
    (spans,) = ran(schedule, UNIT)
    late = [
        TimedAction(span.action, span.start_s + (n > 2), span.end_s + (n > 2)) for n, span in enumerate(spans)
    ]
    found = idle_causes(schedule, [late])
    assert causes(found.ranks[0]) == {"straggler": 1.0}
    assert found.critical.delay_ns == SECOND


def test_pipelines_side_by_side_wait_for_the_slowest() -> None:
    schedule = build("gpipe", 2, 2)
    slower = replace(UNIT, actions={Action(ActionKind.BACKWARD, 0, 1): 5.0})
    timeline = [*ran(schedule, UNIT), *ran(schedule, slower)]
    found = idle_causes(schedule, timeline, expected(schedule, UNIT) * 2)
    assert found.window_ns == 12 * SECOND
    assert [causes(rank).get("straggler", 0.0) for rank in found.ranks] == pytest.approx([1.8, 3.0, 0.0, 3.0])
    assert {rank for rank, _ in found.critical.spans} == {2, 3}


@dataclass(frozen=True)
class Measured:
    action: str
    start_s: float
    end_s: float


def test_measured_windows_may_count_microbatches_from_zero_again() -> None:
    whole = repeat(build("1f1b", 2, 2), 2)
    measured = [
        [
            Measured(str(replace(span.action, index=span.action.index % 2)), span.start_s, span.end_s)
            for span in rank
        ]
        for rank in ran(whole, UNIT)
    ]
    assert idle_causes(whole, measured) == idle_causes(whole, ran(whole, UNIT))


@pytest.mark.parametrize(
    ("timeline", "problem"),
    [
        ([], r"a timeline with \[\] actions per rank is none of a schedule with \[2, 2\]"),
        ([[], []], "use the schedule that the step ran"),
        ([[Measured("0F0", 0, 1), Measured("0B0", 1, 2)], []], r"\[2, 0\] actions per rank"),
        (
            [[Measured("0F0", 0, 1), Measured("0B0", 3, 4)], [Measured("1F0", 1, 2), Measured("1I0", 2, 3)]],
            "rank 1 ran 1I0 where the schedule has 1B0",
        ),
    ],
)
def test_a_timeline_of_another_schedule_is_refused(timeline: list[list[Measured]], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        idle_causes(build("gpipe", 2, 1), timeline)


def test_expected_times_of_another_step_are_refused() -> None:
    schedule = build("gpipe", 2, 1)
    with pytest.raises(ValueError, match=r"\[2\] actions per rank do not fit a step of \[2, 2\]"):
        idle_causes(schedule, ran(schedule, UNIT), [[1.0, 1.0]])


SIZES: Mapping[str, tuple[int, int]] = {
    "gpipe": (1, 4),
    "1f1b": (1, 4),
    "interleaved": (2, 3),
    "zb-h1": (1, 4),
    "zbv": (1, 3),
}


@settings(deadline=None, max_examples=150)
@given(name=st.sampled_from(sorted(SIZES)), pipelines=st.integers(1, 2), data=st.data())
def test_parts_add_up_to_the_idle_time_exactly(name: str, pipelines: int, data: st.DataObject) -> None:
    least, most = SIZES[name]
    ranks = data.draw(st.integers(least, most))
    schedule = build(name, ranks, ranks * data.draw(st.integers(1, 3)))
    times = st.floats(1e-6, 10)
    timeline: list[list[TimedAction]] = []
    for _ in range(pipelines):
        costs = Costs(
            seconds={},
            communication_s=data.draw(st.floats(0, 2)),
            actions={action: data.draw(times) for program in schedule.programs for action in program},
        )
        # The clocks of ranks differ a little.
        skews = data.draw(st.lists(st.floats(0, 0.3), min_size=ranks, max_size=ranks))
        timeline += [
            [TimedAction(span.action, span.start_s + skew, span.end_s + skew) for span in spans]
            for spans, skew in zip(ran(schedule, costs), skews, strict=True)
        ]
    foreseen = data.draw(st.none() | st.just([[data.draw(times) for _ in spans] for spans in timeline]))
    found = idle_causes(schedule, timeline, foreseen)

    begin = min(round(spans[0].start_s * SECOND) for spans in timeline)
    window = max(round(spans[-1].end_s * SECOND) for spans in timeline) - begin
    for rank, spans in zip(found.ranks, timeline, strict=True):
        busy = sum(round(span.end_s * SECOND) - round(span.start_s * SECOND) for span in spans)
        parts = (rank.dependency_ns, rank.imbalance_ns, rank.communication_ns, rank.straggler_ns)
        assert min(parts) >= 0
        assert (rank.busy_ns, rank.idle_ns) == (busy, window - busy)
        assert sum(parts) == rank.idle_ns
    path = found.critical
    assert path.computing_ns + path.message_ns + path.delay_ns == window
    chain = [timeline[lane][number] for lane, number in path.spans]
    assert all(before.start_s <= after.start_s for before, after in pairwise(chain))
    assert chain[-1].end_s == max(spans[-1].end_s for spans in timeline)


def test_five_thousand_actions_take_less_than_a_fifth_of_a_second() -> None:
    schedule = build("zb-h1", 8, 209)
    costs = Costs.uniform(forward_s=1, input_grad_s=1.2, weight_grad_s=0.9, communication_s=0.1)
    timeline = ran(schedule, costs)
    assert sum(map(len, timeline)) > 5_000
    idle_causes(schedule, timeline)
    took: list[float] = []
    for _ in range(5):
        began = time.thread_time()
        idle_causes(schedule, timeline, expected(schedule, UNIT))
        took.append(time.thread_time() - began)
    assert min(took) < 0.2
