"""The actions of one window, added up by stage and kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from planner.ir import Action
from planner.observed import StageTime
from workers.protocol.reports import ActionSpan

LEAST_IN_HALF = 2
"""Actions of a kind that each half of a window must have."""
OUTLIER = 3.0
"""Most that an action may count for in a half, as a multiple of the median of its kind."""


def stage_times(spans: Iterable[ActionSpan]) -> tuple[StageTime, ...]:
    """Seconds and number of the actions of each kind of each stage."""
    return tuple(_added(stage, kind, seconds) for (stage, kind), seconds in _by_kind(spans))


def half_times(spans: Iterable[ActionSpan]) -> tuple[tuple[StageTime, ...], ...]:
    """The same for the earlier and the later half of each kind's actions: whether a rank was slow in both tells a
    lasting cause from a moment's. An action that takes longer than `OUTLIER` times the median counts for that.

    Empty if a kind has too few actions.
    """
    earlier, later = list[StageTime](), list[StageTime]()
    for (stage, kind), seconds in _by_kind(spans):
        middle = len(seconds) // 2
        if middle < LEAST_IN_HALF:
            return ()
        for half, taken in ((earlier, seconds[:middle]), (later, seconds[middle:])):
            most = OUTLIER * median(taken)
            half.append(_added(stage, kind, [min(one, most) for one in taken]))
    return (tuple(earlier), tuple(later)) if earlier else ()


def _by_kind(spans: Iterable[ActionSpan]) -> list[tuple[tuple[int, str], list[float]]]:
    """(stage, kind) -> seconds of its actions, in the order in which they ran."""
    found: dict[tuple[int, str], list[float]] = {}
    for span in sorted(spans, key=lambda span: span.start_s):
        action = Action.parse(span.action)
        found.setdefault((action.stage, str(action.kind)), []).append(span.end_s - span.start_s)
    return sorted(found.items())


def _added(stage: int, kind: str, seconds: Sequence[float]) -> StageTime:
    return StageTime(kind=kind, stage=stage, seconds=sum(seconds), count=len(seconds))
