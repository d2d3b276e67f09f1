"""A timeline as SVG, or two of them on one axis.

Knows only spans per rank, simulated or measured, what share of a backward is frozen and what memory is used for: no
schedule, no cost, no file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, log10

from orchestrator.pictures import memory_strip
from orchestrator.pictures.heat_map import Shares
from orchestrator.pictures.memory_use import Used, present, used
from orchestrator.pictures.spans import (
    COLOURS,
    NAMES,
    Span,
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
from planner.ir import FREEZABLE, Action, Kind
from planner.simulation.memory import OverTime

# One grey for all text: it reads on a light and on a dark page, whatever page the picture is set into.
_STYLE = """
.timeline text { font: 11px system-ui, sans-serif; fill: #747d89; }
.timeline .token { font: 10px ui-monospace, monospace; fill: #14181d; text-anchor: middle; }
.timeline .title { font-size: 13px; font-weight: 600; }
.timeline .middle { text-anchor: middle; }
.timeline .bubble { fill: #8a93a0; fill-opacity: 0.18; }
.timeline .tick { stroke: #8a93a0; stroke-opacity: 0.5; }
.timeline .heading { font-weight: 600; }
.timeline .end { stroke: #c2570c; stroke-dasharray: 3 2; }
.timeline .frozen { fill: #ffffff; fill-opacity: 0.55; pointer-events: none; }
"""

_LEFT, _TOP, _LANE, _GAP, _RIGHT, _HEADING = 60, 54, 24, 6, 24, 22
_LEGEND, _STRIP_GAP = 20, 3
_TOKEN_PIXELS = 6.2
"""Width of a character of a token."""
_TITLE_PIXELS = 7.8
"""And of one of the title, at most."""


@dataclass(frozen=True)
class _Group:
    """Lanes that belong together, the bubbles reaching to `end_s`."""

    name: str
    timeline: Timeline
    actions: list[list[Action]]
    end_s: float
    shares: Mapping[tuple[int, int], float]
    """(stage, microbatch) -> frozen share."""
    memory: Sequence[Sequence[Used]] = ()
    """Per rank; none: it is not shown."""

    @staticmethod
    def of(
        name: str, timeline: Timeline, end_s: float | None, frozen: Shares, memory: Sequence[OverTime] = ()
    ) -> _Group:
        return _Group(
            name,
            timeline,
            parsed(timeline),
            end_of(timeline, end_s),
            by_action(frozen),
            [used(rank) for rank in memory],
        )

    @property
    def row(self) -> int:
        """Height of a rank's row."""
        return _LANE + _GAP + (_STRIP_GAP + memory_strip.HEIGHT + _GAP if self.memory else 0)

    @property
    def height(self) -> int:
        return (_HEADING if self.name else 0) + len(self.timeline) * self.row


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
        title: stands above the lanes.
        end_s: where the axis ends; unset, with the last span.
        width: of the time axis, in pixels; unset, what lets most boxes show their tokens.
        frozen: share of weight-gradient time that a backward leaves out: so much of its box's height is pale.
        memory: what each rank's memory is used for: a strip below its lane, all to one scale. Empty: no strips.
    """
    return _draw([_Group.of("", timeline, end_s, frozen, memory)], title, width)


def compare_svg(
    predicted: Timeline,
    measured: Timeline,
    title: str = "",
    *,
    ends_s: tuple[float | None, float | None] = (None, None),
    width: int | None = None,
    frozen: tuple[Shares, Shares] = ((), ()),
    memory: tuple[Sequence[OverTime], Sequence[OverTime]] = ((), ()),
) -> str:
    """Two timelines of one step, one under the other on the same axis; a line marks where each ends.

    Args:
        ends_s: where the predicted and the measured step end; unset, with their last spans.
        frozen: what the predicted and what the measured step leaves out, as of `svg`; so are `title` and `width`.
        memory: what the ranks' memory is used for in each, as of `svg`, all to one scale.
    """
    groups = [
        _Group.of("predicted", predicted, ends_s[0], frozen[0], memory[0]),
        _Group.of("measured", measured, ends_s[1], frozen[1], memory[1]),
    ]
    return _draw(groups, title, width)


def _draw(groups: Sequence[_Group], title: str, width: int | None) -> str:
    end_s = max(group.end_s for group in groups)
    if width is None:
        most = max((len(spans) for group in groups for spans in group.timeline), default=0)
        width = min(max(30 * most, 640), 6000)
    scale = width / end_s if end_s else 0.0
    ranks = [rank for group in groups for rank in group.memory]
    most = max(map(memory_strip.peak_of, ranks), default=0)
    top = _TOP + (_LEGEND if most else 0)
    bottom = top + sum(group.height for group in groups)
    total, height = _LEFT + max(width, ceil(_TITLE_PIXELS * len(title))) + _RIGHT, bottom + 34

    parts = [
        '<svg class="timeline" xmlns="http://www.w3.org/2000/svg" role="img"'
        f' width="{total}" height="{height}" viewBox="0 0 {total} {height}">',
        f"<title>{escape(title or 'timeline')}</title><style>{_STYLE + memory_strip.STYLE * bool(most)}</style>",
        f'<text class="title" x="{_LEFT}" y="18">{escape(title)}</text>',
        *_legend(
            kinds_of([rank for group in groups for rank in group.actions]),
            any(group.shares for group in groups),
        ),
        *(memory_strip.legend(present(ranks), left=_LEFT, top=_TOP - 4) if most else ()),
        *_axis(end_s, scale, top, bottom),
    ]
    for group in groups:
        parts += _group(group, top, scale, most)
        top += group.height
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _group(group: _Group, top: int, scale: float, most: int) -> list[str]:
    parts: list[str] = []
    end = _LEFT + group.end_s * scale
    first = top
    if group.name:
        first += _HEADING
        parts.append(
            f'<text class="heading" x="4" y="{top + 16}">{group.name}, {seconds_text(group.end_s)}</text>'
            f'<line class="end" x1="{end:.2f}" y1="{top + 6}" x2="{end:.2f}" y2="{top + group.height - _GAP}"/>'
        )
    for rank, spans in enumerate(group.timeline):
        y = first + rank * group.row
        parts.append(f'<text x="4" y="{y + 16}">rank {rank}</text>')
        parts.append(f'<rect class="bubble" x="{_LEFT}" y="{y}" width="{end - _LEFT:g}" height="{_LANE}"/>')
        for action, span in zip(group.actions[rank], spans, strict=True):
            share = share_of(group.shares, action)
            parts.append(_action(action, span, y, scale, group.end_s, share))
        if group.memory and most:
            below = y + _LANE + _STRIP_GAP
            parts += memory_strip.strip(
                rank, group.memory[rank], most, group.end_s, left=_LEFT, top=below, scale=scale
            )
    return parts


def _action(action: Action, span: Span, y: int, scale: float, end_s: float, share: float) -> str:
    x, box = _LEFT + span.start_s * scale, (span.end_s - span.start_s) * scale
    place = f'x="{x:.2f}" y="{y}" width="{max(box - 0.6, 0.4):.2f}"'
    told = f", {100 * share:.0f} % frozen" if share else ""
    drawn = (
        f'<rect {place} height="{_LANE}" rx="2" fill="{COLOURS[action.kind]}">'
        f"<title>{action}: {_span_text(span, end_s)}{told}</title></rect>"
    )
    if share:
        drawn += f'<rect class="frozen" {place} height="{_LANE * share:.1f}"/>'
    token = str(action)
    if len(token) * _TOKEN_PIXELS + 2 <= box:
        drawn += f'<text class="token" x="{x + box / 2:.2f}" y="{y + 16}">{token}</text>'
    return drawn


def _span_text(span: Span, end_s: float) -> str:
    _, factor = unit_of(end_s)
    return f"{number_text(span.start_s * factor)} to {seconds_text(span.end_s, end_s)}"


def _legend(kinds: list[Kind], frozen: bool) -> list[str]:
    parts: list[str] = []
    x = float(_LEFT)
    entries = [(f'fill="{COLOURS[kind]}"', f"{kind} {NAMES[kind]}") for kind in kinds]
    entries.append(('class="bubble"', "bubble"))
    entries += [(f'fill="{COLOURS[kind]}"', "pale: frozen share") for kind in kinds if kind in FREEZABLE][
        :frozen
    ]
    for fill, name in entries:
        parts.append(f'<rect {fill} x="{x:.0f}" y="30" width="12" height="12" rx="2"/>')
        if name.startswith("pale"):
            parts.append(f'<rect class="frozen" x="{x:.0f}" y="30" width="12" height="7"/>')
        parts.append(f'<text x="{x + 17:.0f}" y="40">{name}</text>')
        x += 36 + 6.5 * len(name)
    return parts


def _axis(end_s: float, scale: float, top: int, y: int) -> list[str]:
    """Ticks at round times, and the unit."""
    unit, factor = unit_of(end_s)
    step = _round_step(end_s * factor / max(end_s * scale / 90, 1)) if end_s else 1.0
    parts: list[str] = []
    for number in range(int(end_s * factor / step + 1e-9) + 1):
        x = _LEFT + number * step / factor * scale
        parts.append(f'<line class="tick" x1="{x:.2f}" y1="{top - 2}" x2="{x:.2f}" y2="{y + 4}"/>')
        parts.append(f'<text class="middle" x="{x:.2f}" y="{y + 16}">{number * step:.6g}</text>')
    parts.append(f'<text x="4" y="{y + 16}">time, {unit}</text>')
    return parts


def _round_step(least: float) -> float:
    """The next of 1, 2, 5, 10, 20, ... that is not below `least`."""
    power = 10.0 ** (ceil(log10(least)) - 1)
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
