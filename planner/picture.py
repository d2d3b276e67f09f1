"""A timeline as a picture: SVG for pages, text for terminals.

Knows only spans per rank, simulated or measured: no schedule, no cost, no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import ceil, log10
from typing import Protocol

from planner.ir import Action, Kind


class Span(Protocol):
    """One action as it ran. A rank's spans are in order of time and do not overlap."""

    @property
    def action(self) -> Action | str: ...

    @property
    def start_s(self) -> float: ...

    @property
    def end_s(self) -> float: ...


Timeline = Sequence[Sequence[Span]]
"""Spans per rank."""

_COLOURS = {
    Kind.FORWARD: "#6aa9f4",
    Kind.BACKWARD: "#62bd7c",
    Kind.INPUT_GRAD: "#8fd3a0",
    Kind.WEIGHT_GRAD: "#f3b14e",
    Kind.RECOMPUTE: "#c39bd8",
    Kind.UPDATE: "#b9bec6",
}
_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRAD: "input gradient",
    Kind.WEIGHT_GRAD: "weight gradient",
    Kind.RECOMPUTE: "recompute",
    Kind.UPDATE: "update",
}
# One grey for all text: it reads on a light and on a dark page, whatever page the picture is set into.
_STYLE = """
.timeline text { font: 11px system-ui, sans-serif; fill: #747d89; }
.timeline .token { font: 10px ui-monospace, monospace; fill: #14181d; text-anchor: middle; }
.timeline .title { font-size: 13px; font-weight: 600; }
.timeline .middle { text-anchor: middle; }
.timeline .bubble { fill: #8a93a0; fill-opacity: 0.18; }
.timeline .tick { stroke: #8a93a0; stroke-opacity: 0.5; }
"""

_LEFT, _TOP, _LANE, _GAP, _RIGHT = 60, 54, 24, 6, 24
_TOKEN_PIXELS = 6.2
"""Width of a character of a token."""


def svg(timeline: Timeline, title: str = "", end_s: float | None = None, width: int | None = None) -> str:
    """A self-contained SVG: a lane per rank, a box with its token per action, bubbles grey, a time axis.

    Args:
        timeline: spans per rank, in seconds from 0.
        title: stands above the lanes.
        end_s: where the axis ends; unset, with the last span.
        width: of the time axis, in pixels; unset, what lets most boxes show their tokens.
    """
    actions = _parsed(timeline)
    end_s = _end(timeline, end_s)
    if width is None:
        width = min(max(30 * max((len(spans) for spans in timeline), default=0), 640), 6000)
    scale = width / end_s if end_s else 0.0
    bottom = _TOP + len(timeline) * (_LANE + _GAP)
    total, height = _LEFT + width + _RIGHT, bottom + 34

    parts = [
        '<svg class="timeline" xmlns="http://www.w3.org/2000/svg" role="img"'
        f' width="{total}" height="{height}" viewBox="0 0 {total} {height}">',
        f"<title>{escape(title or 'timeline')}</title><style>{_STYLE}</style>",
        f'<text class="title" x="{_LEFT}" y="18">{escape(title)}</text>',
        *_legend(actions),
        *_axis(end_s, scale, bottom),
    ]
    for rank, spans in enumerate(timeline):
        y = _TOP + rank * (_LANE + _GAP)
        parts.append(f'<text x="4" y="{y + 16}">rank {rank}</text>')
        parts.append(f'<rect class="bubble" x="{_LEFT}" y="{y}" width="{width}" height="{_LANE}"/>')
        for action, span in zip(actions[rank], spans, strict=True):
            x, box = _LEFT + span.start_s * scale, (span.end_s - span.start_s) * scale
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{max(box - 0.6, 0.4):.2f}" height="{_LANE}" rx="2"'
                f' fill="{_COLOURS[action.kind]}"><title>{action}: {_span_text(span, end_s)}</title></rect>'
            )
            token = str(action)
            if len(token) * _TOKEN_PIXELS + 2 <= box:
                parts.append(f'<text class="token" x="{x + box / 2:.2f}" y="{y + 16}">{token}</text>')
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def terminal(timeline: Timeline, width: int, end_s: float | None = None, markup: bool = True) -> str:
    """The timeline in `width` columns: a line per rank, `·` for bubbles, a time axis.

    Each column shows what runs in its middle; a box shows its token, or kind and index, or only the kind, as
    room allows. With `markup` the boxes are coloured by rich's markup, otherwise the text is plain.
    """
    actions = _parsed(timeline)
    end_s = _end(timeline, end_s)
    label = len(f"rank {len(timeline) - 1} ")
    columns = max(width - label, 10)
    lines: list[str] = []
    for rank, spans in enumerate(timeline):
        owners = _owners(spans, columns, end_s)
        line, column = f"rank {rank} ".ljust(label), 0
        while column < columns:
            stop = column + 1
            while stop < columns and owners[stop] == owners[column]:
                stop += 1
            line += _box(actions[rank], owners[column], stop - column, markup)
            column = stop
        lines.append(line)
    lines.append(" " * label + "0" + seconds_text(end_s).rjust(columns - 1))
    return "\n".join(lines)


def legend(timeline: Timeline, markup: bool = True) -> str:
    """One line that says what the letters and colours of `terminal` mean."""
    return "  ".join(
        [_coloured(f" {kind} ", kind, markup) + f" {_NAMES[kind]}" for kind in _kinds(_parsed(timeline))]
        + ["· bubble"]
    )


def seconds_text(seconds: float, scale_s: float | None = None) -> str:
    """`seconds` for people, in s, ms or µs: the unit that suits `scale_s` (unset: itself)."""
    unit, factor = _unit(seconds if scale_s is None else scale_s)
    return f"{_number(seconds * factor)} {unit}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def _span_text(span: Span, end_s: float) -> str:
    _, factor = _unit(end_s)
    return f"{_number(span.start_s * factor)} to {seconds_text(span.end_s, end_s)}"


def _parsed(timeline: Timeline) -> list[list[Action]]:
    return [
        [span.action if isinstance(span.action, Action) else Action.parse(span.action) for span in spans]
        for spans in timeline
    ]


def _kinds(actions: list[list[Action]]) -> list[Kind]:
    present = {action.kind for rank in actions for action in rank}
    return [kind for kind in Kind if kind in present]


def _end(timeline: Timeline, end_s: float | None) -> float:
    return max([end_s or 0.0, *(span.end_s for spans in timeline for span in spans)])


def _unit(scale_s: float) -> tuple[str, float]:
    """The unit for times up to `scale_s`, and how many of it make a second."""
    if scale_s >= 1 or scale_s == 0:
        return "s", 1.0
    return ("ms", 1e3) if scale_s >= 1e-3 else ("µs", 1e6)


def _legend(actions: list[list[Action]]) -> list[str]:
    parts: list[str] = []
    x = float(_LEFT)
    entries = [(f'fill="{_COLOURS[kind]}"', f"{kind} {_NAMES[kind]}") for kind in _kinds(actions)]
    for fill, name in [*entries, ('class="bubble"', "bubble")]:
        parts.append(f'<rect {fill} x="{x:.0f}" y="30" width="12" height="12" rx="2"/>')
        parts.append(f'<text x="{x + 17:.0f}" y="40">{name}</text>')
        x += 36 + 6.5 * len(name)
    return parts


def _axis(end_s: float, scale: float, y: int) -> list[str]:
    """Ticks at round times, and the unit."""
    unit, factor = _unit(end_s)
    step = _round_step(end_s * factor / max(end_s * scale / 90, 1)) if end_s else 1.0
    parts: list[str] = []
    for number in range(int(end_s * factor / step + 1e-9) + 1):
        x = _LEFT + number * step / factor * scale
        parts.append(f'<line class="tick" x1="{x:.2f}" y1="{_TOP - 2}" x2="{x:.2f}" y2="{y + 4}"/>')
        parts.append(f'<text class="middle" x="{x:.2f}" y="{y + 16}">{number * step:.6g}</text>')
    parts.append(f'<text x="4" y="{y + 16}">time, {unit}</text>')
    return parts


def _round_step(least: float) -> float:
    """The next of 1, 2, 5, 10, 20, ... that is not below `least`."""
    power = 10.0 ** (ceil(log10(least)) - 1)
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _owners(spans: Sequence[Span], columns: int, end_s: float) -> list[int | None]:
    """Per column, the number of the span that covers its middle, None in a bubble."""
    owners: list[int | None] = [None] * columns
    if not end_s:
        return owners
    number = 0
    for column in range(columns):
        middle = (column + 0.5) * end_s / columns
        while number < len(spans) and spans[number].end_s <= middle:
            number += 1
        if number < len(spans) and spans[number].start_s <= middle:
            owners[column] = number
    return owners


def _box(actions: list[Action], owner: int | None, width: int, markup: bool) -> str:
    if owner is None:
        return "·" * width
    action = actions[owner]
    texts = (str(action), f"{action.kind}{action.index}", str(action.kind))
    text = next((text for text in texts if len(text) < width), str(action.kind))
    return _coloured(text.ljust(width), action.kind, markup)


def _coloured(text: str, kind: Kind, markup: bool) -> str:
    return f"[#14181d on {_COLOURS[kind]}]{text}[/]" if markup else text
