"""The layout of a timeline, or of two on one axis: the position of every box, lane and tick.

Knows only spans per rank, simulated or measured, the frozen share of each backward, and the uses of memory:
no schedule, no cost, no file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log10

from orchestrator.pictures.heat_map import Shares
from orchestrator.pictures.memory_strip import HEIGHT as STRIP
from orchestrator.pictures.memory_strip import peak_of, strip
from orchestrator.pictures.memory_use import USES, Used, present, used
from orchestrator.pictures.spans import (
    COLOURS,
    NAMES,
    DrawnSpan,
    Timeline,
    by_action,
    end_of,
    kinds_of,
    number_text,
    parsed,
    seconds_text,
    share_of,
    unit_of,
)
from orchestrator.pictures.timeline_picture import LANE, LEFT, Box, Key, Lane, LaneGroup, Picture, Tick
from planner.ir import FREEZABLE, Action, ActionKind
from planner.simulation.memory import OverTime

_TOP, _GAP, _RIGHT, _HEADING = 54, 6, 24, 22
_LEGEND, _STRIP_GAP = 20, 3
_TOKEN_PIXELS = 6.2
"""Width of a character of a token."""
_TITLE_PIXELS = 7.8
"""Largest width of a character of the title."""


@dataclass(frozen=True)
class Step:
    """The content of one group."""

    name: str
    timeline: Timeline
    end_s: float | None
    """End of the step; None: the end of its last span."""
    frozen: Shares = ()
    """Share of weight-gradient time that a backward skips: this share of its box's height is pale."""
    memory: Sequence[OverTime] = ()
    """Each rank's memory by use: a strip below its lane, all to one scale. Empty: no strips."""
    critical: Collection[tuple[int, int]] = ()
    """(rank, number of the span) of the actions on the critical path, which are underlined."""


def svg(
    timeline: Timeline,
    title: str = "",
    end_s: float | None = None,
    width: int | None = None,
    frozen: Shares = (),
    memory: Sequence[OverTime] = (),
) -> str:
    """A self-contained SVG: a lane per rank, a box with its token per action, bubbles grey, a time axis.

    Args:
        timeline: spans per rank, in seconds from 0.
        title: shown above the lanes.
        end_s: as in `Step`, like `frozen` and `memory`.
        width: width of the time axis, in pixels; unset: wide enough that most boxes show their tokens.
    """
    return picture([Step("", timeline, end_s, frozen, memory)], title, width).svg()


def picture(steps: Sequence[Step], title: str, width: int | None = None) -> Picture:
    """Steps below each other on one axis; a line marks the end of each named step."""
    groups = [_Measured.of(step) for step in steps]
    end_s = max(group.end_s for group in groups)
    if width is None:
        most_spans = max((len(spans) for step in steps for spans in step.timeline), default=0)
        width = min(max(30 * most_spans, 640), 6000)
    scale = width / end_s if end_s else 0.0
    ranks = [rank for group in groups for rank in group.memory]
    most_bytes = max(map(peak_of, ranks), default=0)
    top = _TOP + (_LEGEND if most_bytes else 0)
    bottom = top + sum(group.height for group in groups)
    drawn = []
    below = top
    for group in groups:
        drawn.append(group.drawn(below, scale, most_bytes))
        below += group.height
    kinds = kinds_of([rank for group in groups for rank in group.actions])
    return Picture(
        title=title,
        width=LEFT + max(width, ceil(_TITLE_PIXELS * len(title))) + _RIGHT,
        height=bottom + 34,
        top=top,
        bottom=bottom,
        unit=unit_of(end_s)[0],
        legend=_legend(kinds, any(group.shares for group in groups), any(group.critical for group in groups)),
        memory_legend=_memory_legend(present(ranks)) if most_bytes else [],
        ticks=_ticks(end_s, scale),
        groups=drawn,
    )


@dataclass(frozen=True)
class _Measured:
    """A step with everything that drawing it needs."""

    step: Step
    actions: list[list[Action]]
    end_s: float
    shares: Mapping[tuple[int, int], float]
    """(stage, microbatch) -> frozen share."""
    memory: Sequence[Sequence[Used]]
    critical: frozenset[tuple[int, int]]

    @staticmethod
    def of(step: Step) -> _Measured:
        return _Measured(
            step,
            parsed(step.timeline),
            end_of(step.timeline, step.end_s),
            by_action(step.frozen),
            [used(rank) for rank in step.memory],
            frozenset(step.critical),
        )

    @property
    def row(self) -> int:
        """Height of a rank's row."""
        return LANE + _GAP + (_STRIP_GAP + STRIP + _GAP if self.memory else 0)

    @property
    def height(self) -> int:
        return (_HEADING if self.step.name else 0) + len(self.step.timeline) * self.row

    def drawn(self, top: int, scale: float, most_bytes: int) -> LaneGroup:
        name = self.step.name
        first = top + (_HEADING if name else 0)
        lanes = []
        for rank, spans in enumerate(self.step.timeline):
            y = first + rank * self.row
            boxes = [
                _box(
                    action,
                    span,
                    scale,
                    self.end_s,
                    share_of(self.shares, action),
                    (rank, number) in self.critical,
                )
                for number, (action, span) in enumerate(zip(self.actions[rank], spans, strict=True))
            ]
            below = None
            if self.memory and most_bytes:
                below = strip(
                    self.memory[rank],
                    most_bytes,
                    self.end_s,
                    left=LEFT,
                    top=y + LANE + _STRIP_GAP,
                    scale=scale,
                )
            lanes.append(Lane(rank, y, boxes, below))
        return LaneGroup(
            heading=f"{name}, {seconds_text(self.end_s)}" if name else "",
            top=top,
            bottom=top + self.height - _GAP,
            end=LEFT + self.end_s * scale,
            lanes=lanes,
        )


def _box(action: Action, span: DrawnSpan, scale: float, end_s: float, share: float, critical: bool) -> Box:
    x, width = LEFT + span.start_s * scale, (span.end_s - span.start_s) * scale
    _, factor = unit_of(end_s)
    frozen = f", {100 * share:.0f} % frozen" if share else ""
    path = ", on the critical path" if critical else ""
    token = str(action)
    return Box(
        x=x,
        width=max(width - 0.6, 0.4),
        colour=COLOURS[action.kind],
        text=f"{token}: {number_text(span.start_s * factor)} to {seconds_text(span.end_s, end_s)}{frozen}{path}",
        token=token if len(token) * _TOKEN_PIXELS + 2 <= width else "",
        middle=x + width / 2,
        pale=LANE * share,
        critical=critical,
    )


def _legend(kinds: list[ActionKind], frozen: bool, critical: bool) -> list[Key]:
    entries = [(f"{kind} {NAMES[kind]}", COLOURS[kind], False) for kind in kinds]
    entries.append(("bubble", "", False))
    freezable = [kind for kind in kinds if kind in FREEZABLE]
    entries += [("pale: frozen share", COLOURS[kind], True) for kind in freezable[:frozen]]
    keys: list[Key] = []
    x = float(LEFT)
    for text, colour, pale in entries:
        keys.append(Key(x, text, colour, pale))
        x += 36 + 6.5 * len(text)
    if critical:
        keys.append(Key(x, "underlined: critical path", underline=True))
    return keys


def _memory_legend(numbers: Sequence[int]) -> list[Key]:
    keys: list[Key] = []
    x = float(LEFT)
    for number in numbers:
        keys.append(Key(x, USES[number].name, USES[number].colour))
        x += 32 + 6.1 * len(USES[number].name)
    return keys


def _ticks(end_s: float, scale: float) -> list[Tick]:
    """Round times from 0 on, at least about 90 pixels apart."""
    _, factor = unit_of(end_s)
    step = _round_step(end_s * factor / max(end_s * scale / 90, 1)) if end_s else 1.0
    return [
        Tick(LEFT + number * step / factor * scale, f"{number * step:.6g}")
        for number in range(int(end_s * factor / step + 1e-9) + 1)
    ]


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... that is not below `least`."""
    power = 10.0 ** (ceil(log10(least)) - 1)
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
