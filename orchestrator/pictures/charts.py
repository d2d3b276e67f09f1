"""Line charts as SVG text: axes, ticks, thinning, a readout under the pointer. Pure: numbers in, markup out.

Knows no job and no event. Colours and fonts come by class from the page's stylesheet, `report/style.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby, pairwise
from statistics import median

from orchestrator.pictures.axes import Scale, step_text, tick_text

Point = tuple[float, float]

WIDTH, HEIGHT = 540.0, 264.0
"""Size of a chart in its own units; the page scales it."""
LEFT, RIGHT, TOP, BOTTOM = 62.0, 14.0, 30.0, 34.0
"""Margins around the plot, wide enough for the larger letters of a narrow screen."""
MOST_POINTS = 600
"""A curve of more is drawn as a band and its medians."""
MOST_BINS = 300
MOST_READOUTS = 180
MOST_MARKS = 60


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve. A value that is not finite is a gap."""

    name: str
    points: tuple[Point, ...]
    """(step, value), ascending steps."""
    dots: bool = False
    """Draw each point as a dot as well: for curves of few points."""


@dataclass(frozen=True, kw_only=True)
class Band:
    """A run of steps that is tinted behind the curves."""

    name: str
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What a chart shows, beside its curves."""

    title: str
    unit: str
    """Over the value axis, e.g. `tokens/s`."""
    series: tuple[Series, ...]
    format: Callable[[float], str]
    """Value -> text, for readouts and the description."""
    from_zero: bool = False
    """Whether the value axis starts at 0."""
    logarithmic: bool = False
    """Whether the value axis is logarithmic, where the values span a decade and a half or more."""
    marks: tuple[int, ...] = ()
    """Steps to mark on the step axis."""
    mark_name: str = ""
    bands: tuple[Band, ...] = ()
    """In order of steps, each with a tint of its own."""
    axis: str = "step"
    """What the points are ordered by: every `step` in here stands for it."""


@dataclass(frozen=True)
class Bin:
    """A run of neighbouring points, or a single one."""

    step: float
    """In the middle of the run."""
    low: float
    middle: float
    """Median of the run's values."""
    high: float


def bins(points: Sequence[Point]) -> list[Bin]:
    """`points` (finite values) one by one, or in `MOST_BINS` equal runs if there are many."""
    if len(points) <= MOST_POINTS:
        return [Bin(step, value, value, value) for step, value in points]
    runs = []
    for number in range(MOST_BINS):
        run = points[number * len(points) // MOST_BINS : (number + 1) * len(points) // MOST_BINS]
        values = [value for _, value in run]
        runs.append(Bin((run[0][0] + run[-1][0]) / 2, min(values), median(values), max(values)))
    return runs


def value_scale(chart: Chart) -> tuple[Scale, int]:
    """The value axis, and how many values lie above it.

    A few outliers (the first step, a stall) would press the rest flat: where the largest value is more than
    thrice the 98th percentile, the axis ends a little over that percentile.
    """
    values = sorted(value for series in chart.series for _, value in series.points if math.isfinite(value))
    bottom, top = HEIGHT - BOTTOM, TOP
    if not values:
        return Scale(0.0, 1.0, bottom, top), 0
    low, high = values[0], values[-1]
    if chart.logarithmic and low > 0 and high / low > 30:
        return Scale(low / 1.1, high * 1.1, bottom, top, logarithmic=True), 0
    typical = values[int(0.98 * (len(values) - 1))]
    if len(values) >= 20 and high > 3 * typical > 0:
        high = 1.3 * typical
    if chart.from_zero:
        low, high = 0.0, (high * 1.08 or 1.0)
    else:
        padding = 0.06 * (high - low) or 0.5 * abs(high) or 1.0
        low, high = low - padding, high + padding
    return Scale(low, high, bottom, top), sum(value > high for value in values)


def step_scale(chart: Chart) -> Scale:
    steps = [step for series in chart.series for step, _ in series.points] or [0.0, 1.0]
    low, high = min(steps), max(steps)
    if low == high:
        low, high = low - 1, high + 1
    return Scale(low, high, LEFT, WIDTH - RIGHT)


def line_chart(chart: Chart) -> str:
    """The chart as one `<svg>` element."""
    x, (y, above) = step_scale(chart), value_scale(chart)
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img">',
        f"<title>{escape(chart.title)}</title><desc>{escape(describe(chart))}</desc>",
        _bands(chart, x),
        _axes(chart, x, y),
        _marks(chart, x),
    ]
    parts += [_curve(series, index, x, y) for index, series in enumerate(chart.series)]
    if above:
        parts.append(
            f'<text class="above" x="{WIDTH - RIGHT:g}" y="{TOP + 12:g}" text-anchor="end">'
            f"▲ {above} above the axis</text>"
        )
    parts += [_readouts(chart, x, y), "</svg>"]
    return "".join(parts)


def describe(chart: Chart) -> str:
    """The chart in words, for who cannot see it."""
    sentences = []
    for series in chart.series:
        points = [point for point in series.points if math.isfinite(point[1])]
        if not points:
            sentences.append(f"{series.name}: no values.")
            continue
        lowest, highest = min(points, key=lambda p: p[1]), max(points, key=lambda p: p[1])
        sentences.append(
            f"{series.name}: {chart.format(points[0][1])} at {chart.axis} {points[0][0]:,.0f},"
            f" {chart.format(points[-1][1])} at {chart.axis} {points[-1][0]:,.0f};"
            f" lowest {chart.format(lowest[1])} at {chart.axis} {lowest[0]:,.0f},"
            f" highest {chart.format(highest[1])} at {chart.axis} {highest[0]:,.0f}."
        )
    sentences += [f"{band.name}: steps {band.first:,} to {band.last:,}." for band in chart.bands]
    return f"{chart.title}, {chart.unit}. " + " ".join(sentences)


def _bands(chart: Chart, x: Scale) -> str:
    """From half a step before a band's first step to half a step after its last: neighbours touch."""
    parts = []
    for number, band in enumerate(chart.bands):
        left, right = x(band.first - 0.5), x(band.last + 0.5)
        parts.append(
            f'<rect class="band b{number}" x="{left:.1f}" y="{TOP:g}" width="{right - left:.1f}"'
            f' height="{HEIGHT - TOP - BOTTOM:g}"><title>{escape(band.name)}: steps {band.first:,} to'
            f" {band.last:,}</title></rect>"
        )
    return "".join(parts)


def _axes(chart: Chart, x: Scale, y: Scale) -> str:
    parts = ['<g class="axes">']
    for value in y.ticks(6):
        height = y(value)
        parts.append(
            f'<line class="grid" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{height:.1f}" y2="{height:.1f}"/>'
            f'<text x="{LEFT - 8:g}" y="{height:.1f}" dy=".35em" text-anchor="end">{tick_text(value)}</text>'
        )
    below = y.start + 21
    for step in (tick for tick in x.ticks(6) if tick == int(tick)):
        place = f"{x(step):.1f}"
        parts.append(
            f'<line class="tick" x1="{place}" x2="{place}" y1="{y.start:g}" y2="{y.start + 5:g}"/>'
            f'<text x="{place}" y="{below:g}" text-anchor="middle">{step_text(step)}</text>'
        )
    scale = " (log scale)" if y.logarithmic else ""
    parts.append(
        f'<line class="axis" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y.start:g}" y2="{y.start:g}"/>'
        f'<text x="{LEFT - 8:g}" y="{below:g}" text-anchor="end">{escape(chart.axis)}</text>'
        f'<text x="{LEFT:g}" y="14">{escape(chart.unit)}{scale}</text></g>'
    )
    return "".join(parts)


def _marks(chart: Chart, x: Scale) -> str:
    return "".join(
        f'<g class="mark"><title>{escape(chart.mark_name)} {step:,}</title>'
        f'<line x1="{x(step):.1f}" x2="{x(step):.1f}" y1="{TOP:g}" y2="{HEIGHT - BOTTOM:g}"/></g>'
        for step in chart.marks[:MOST_MARKS]
    )


def _curve(series: Series, index: int, x: Scale, y: Scale) -> str:
    """The curve, broken where values are not finite; of a long one, the medians and a band around them."""
    finite = [point for point in series.points if math.isfinite(point[1])]
    shown = bins(finite)
    thinned = len(shown) < len(finite)
    pieces = [shown] if thinned else _pieces(series.points)
    parts = [f'<g class="series s{index}">']
    if thinned:
        edge = [(part.step, part.high) for part in shown] + [
            (part.step, part.low) for part in reversed(shown)
        ]
        parts.append(f'<polygon points="{_coordinates(edge, x, y)}"/>')
    for piece in pieces:
        middles = [(part.step, part.middle) for part in piece]
        if len(piece) > 1:
            parts.append(f'<polyline points="{_coordinates(middles, x, y)}"/>')
        if series.dots or len(piece) == 1:
            parts += [f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="3"/>' for step, value in middles]
    parts += [
        f'<path class="over" d="M{x(part.step):.1f} {TOP:g}l4 7h-8z"/>'
        for part in shown
        if part.high > y.high
    ]
    parts.append("</g>")
    return "".join(parts)


def _pieces(points: Sequence[Point]) -> list[list[Bin]]:
    """The unbroken runs of finite values."""
    runs = groupby(points, key=lambda point: math.isfinite(point[1]))
    return [bins(list(run)) for finite, run in runs if finite]


def _coordinates(points: Sequence[Point], x: Scale, y: Scale) -> str:
    return " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)


def _readouts(chart: Chart, x: Scale, y: Scale) -> str:
    """Invisible bands over the plot: the one under the pointer shows its step and values. No script."""
    first = next((series for series in chart.series if series.points), None)
    if first is None:
        return ""
    stride = math.ceil(len(first.points) / MOST_READOUTS)
    dotted = {step for series in chart.series if series.dots for step, _ in series.points}
    last = len(first.points) - 1
    anchors = [
        point
        for number, point in enumerate(first.points)
        if number % stride == 0 or number == last or point[0] in dotted
    ]
    centres = [x(step) for step, _ in anchors]
    edges = [LEFT, *((a + b) / 2 for a, b in pairwise(centres)), WIDTH - RIGHT]
    others = [dict(series.points) for series in chart.series if series is not first]
    names = [series.name for series in chart.series if series is not first]
    height = HEIGHT - TOP - BOTTOM
    parts = ['<g class="readouts" aria-hidden="true">']
    for band, (step, value) in enumerate(anchors):
        texts = [f"{chart.axis} {step:,.0f}", _value_text(chart, value)]
        texts += [
            f"{name} {_value_text(chart, other[step])}"
            for name, other in zip(names, others, strict=True)
            if step in other
        ]
        centre, width = f"{centres[band]:.1f}", edges[band + 1] - edges[band]
        dot = f'<circle cx="{centre}" cy="{y(value):.1f}" r="3.5"/>' if math.isfinite(value) else ""
        parts.append(
            f'<g><rect x="{edges[band]:.1f}" y="{TOP:g}" width="{width:.1f}" height="{height:g}"/>'
            f'<line x1="{centre}" x2="{centre}" y1="{TOP:g}" y2="{HEIGHT - BOTTOM:g}"/>{dot}'
            f'<text x="{WIDTH - RIGHT:g}" y="14" text-anchor="end">{escape(" · ".join(texts))}</text></g>'
        )
    parts.append("</g>")
    return "".join(parts)


def _value_text(chart: Chart, value: float) -> str:
    return chart.format(value) if math.isfinite(value) else "not finite"
