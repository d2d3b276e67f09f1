"""Timelines as all pictures use them: each rank's actions as they ran, the look of each kind, and times as
text.

Draws nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from orchestrator.pictures.heat_map import Shares
from planner.ir import FREEZABLE, Action, ActionKind


class DrawnSpan(Protocol):
    """One action as it ran. A rank's spans are in order of time and do not overlap."""

    @property
    def action(self) -> Action | str: ...

    @property
    def start_s(self) -> float: ...

    @property
    def end_s(self) -> float: ...


Timeline = Sequence[Sequence[DrawnSpan]]
"""Spans per rank."""

COLOURS = {
    ActionKind.FORWARD: "#6aa9f4",
    ActionKind.BACKWARD: "#62bd7c",
    ActionKind.INPUT_GRAD: "#8fd3a0",
    ActionKind.WEIGHT_GRAD: "#f3b14e",
    ActionKind.RECOMPUTE: "#c39bd8",
    ActionKind.UPDATE: "#b9bec6",
}
NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT_GRAD: "input gradient",
    ActionKind.WEIGHT_GRAD: "weight gradient",
    ActionKind.RECOMPUTE: "recompute",
    ActionKind.UPDATE: "update",
}


def seconds_text(seconds: float, scale_s: float | None = None) -> str:
    """`seconds` as text, in s, ms or µs: the unit that suits `scale_s` (unset: `seconds`)."""
    unit, factor = unit_of(seconds if scale_s is None else scale_s)
    return f"{number_text(seconds * factor)} {unit}"


def number_text(value: float) -> str:
    """Four significant digits, no exponent."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def parsed(timeline: Timeline) -> list[list[Action]]:
    """The action of every span."""
    return [
        [span.action if isinstance(span.action, Action) else Action.parse(span.action) for span in spans]
        for spans in timeline
    ]


def by_action(frozen: Shares) -> Mapping[tuple[int, int], float]:
    """(stage, microbatch) -> frozen share."""
    return {(stage, microbatch): share for stage, microbatch, share in frozen}


def share_of(shares: Mapping[tuple[int, int], float], action: Action) -> float:
    """The share that `action` skips; 0 for actions that freezing does not shorten."""
    return shares.get((action.stage, action.index), 0.0) if action.kind in FREEZABLE else 0.0


def kinds_of(actions: list[list[Action]]) -> list[ActionKind]:
    """The kinds that occur, in the order of `ActionKind`."""
    present = {action.kind for rank in actions for action in rank}
    return [kind for kind in ActionKind if kind in present]


def end_of(timeline: Timeline, end_s: float | None) -> float:
    """`end_s`, or the end of the last span if that is later."""
    return max([end_s or 0.0, *(span.end_s for spans in timeline for span in spans)])


def unit_of(scale_s: float) -> tuple[str, float]:
    """The unit for times up to `scale_s`, and the number of them in a second."""
    if scale_s >= 1 or scale_s == 0:
        return "s", 1.0
    return ("ms", 1e3) if scale_s >= 1e-3 else ("µs", 1e6)
