"""What ranks report of the steps of a small plan, with the times of `small_profile`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planner.observed import StageTime, StepTimes
from planner.plan import Plan


def times(
    plan: Plan,
    members: Sequence[int],
    place: int,
    step: int,
    factor: float,
    *,
    halves: bool = False,
    **changes: Any,
) -> StepTimes:
    """Of a step of two microbatches that took `factor` times as long: F takes 1 s per layer, B 6 s.

    Args:
        halves: whether the report also has two halves of the step, alike.
        changes: other fields.
    """
    layers = plan.layers_per_stage[place]
    measured = tuple(
        StageTime(kind=kind, stage=place, seconds=2 * pass_s * layers * factor, count=2)
        for kind, pass_s in (("F", 1.0), ("B", 6.0))
    )
    fields: dict[str, Any] = {
        "rank": members[place],
        "place": place,
        "step": step,
        "plan": plan.key,
        "times": measured,
        "frozen": False,
        "halves": (measured, measured) if halves else (),
    }
    return StepTimes(**{**fields, **changes})
