"""A window's actions, added up: whole, and by halves."""

from __future__ import annotations

from collections.abc import Sequence

from planner.observed import StageTime
from workers.protocol.reports import ActionSpan
from workers.step.step_reports import half_times, stage_times


def ran(kind: str, seconds: Sequence[float], stage: int = 1) -> list[ActionSpan]:
    """Actions of one kind, in the order of their microbatches, one second apart."""
    return [
        ActionSpan(action=f"{stage}{kind}{number}", start_s=float(number), end_s=number + one)
        for number, one in enumerate(seconds)
    ]


def test_actions_are_added_up_by_stage_and_kind() -> None:
    spans = [*ran("F", (0.1, 0.3)), *ran("B", (0.5,)), *ran("F", (0.25,), stage=0)]
    assert stage_times(spans) == (
        StageTime(kind="F", stage=0, seconds=0.25, count=1),
        StageTime(kind="B", stage=1, seconds=0.5, count=1),
        StageTime(kind="F", stage=1, seconds=0.4, count=2),
    )


def test_halves_are_earlier_and_later_actions_of_each_kind() -> None:
    spans = [*ran("F", (0.25, 0.25, 0.5, 0.5, 0.5)), *ran("B", (0.5, 0.5, 1.0, 1.0))]
    assert half_times(reversed(spans)) == (
        (
            StageTime(kind="B", stage=1, seconds=1.0, count=2),
            StageTime(kind="F", stage=1, seconds=0.5, count=2),
        ),
        (
            StageTime(kind="B", stage=1, seconds=2.0, count=2),
            StageTime(kind="F", stage=1, seconds=1.5, count=3),
        ),
    )


def test_one_action_that_takes_long_counts_for_three() -> None:
    (earlier,), (later,) = half_times(ran("F", (0.25, 0.25, 9.0, 0.25, 0.25, 0.25)))
    assert (earlier.seconds, later.seconds) == (0.25 + 0.25 + 0.75, 0.75)


def test_too_few_actions_of_a_kind_have_no_halves() -> None:
    assert half_times([*ran("F", (0.25,) * 8), *ran("B", (0.5,) * 3)]) == ()
    assert half_times([]) == ()
