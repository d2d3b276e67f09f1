"""The actions of one window, added up by stage and kind."""

from __future__ import annotations

from collections.abc import Iterable

from planner.ir import Action
from planner.observed import StageTime
from workers.protocol import Span


def stage_times(spans: Iterable[Span]) -> tuple[StageTime, ...]:
    """Seconds and number of the actions of each kind of each stage."""
    totals: dict[tuple[int, str], tuple[float, int]] = {}
    for span in spans:
        action = Action.parse(span.action)
        seconds, count = totals.get(key := (action.stage, str(action.kind)), (0.0, 0))
        totals[key] = seconds + span.end_s - span.start_s, count + 1
    return tuple(
        StageTime(kind=kind, stage=stage, seconds=seconds, count=count)
        for (stage, kind), (seconds, count) in sorted(totals.items())
    )
