"""Charts as data: curves with bands and marks, the value axis, and the same in words and as rows of a table.

`static/charts.js` draws them with uPlot. Knows no job, no event and no page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from statistics import median
from typing import Literal

from orchestrator.history.phase_bands import Band
from orchestrator.pictures.spans import unit_of

Point = tuple[float, float]

MOST_POINTS = 600
"""A curve with more points is drawn as a band with its medians."""
MOST_BINS = 250
MOST_MARKS = 60
MOST_NAMED = 5
"""Most marks whose steps the legend lists."""
MOST_ROWS = 20
"""Most rows of the table under a chart."""
VISIBLE = 2_500
"""Tenths of a pixel of a plot's height."""
AXIS_LABELS = {"second": "time, s", "minute": "time, min"}


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve. A value that is not finite is a gap."""

    name: str
    points: tuple[Point, ...]
    """(step, value), ascending steps."""
    dots: bool = False
    """Whether to draw each point as a dot too, for curves of few points."""
    stepped: bool = False
    """Whether a value holds until the next one."""
    labels: tuple[str, ...] = ()
    """A text beside each point; empty: no texts."""
    colour: str = ""
    """A CSS colour; empty: the page's colour for the curve's number."""


@dataclass(frozen=True)
class Bin:
    """A run of neighbouring points, or a single one."""

    step: float
    """The step in the middle of the run."""
    low: float
    middle: float
    """Median of the run's values."""
    high: float


@dataclass(frozen=True)
class ValueAxis:
    """The ends of the value axis."""

    low: float
    high: float
    logarithmic: bool = False
    above: int = 0
    """Number of values above it."""

    def rounded(self, value: float) -> float:
        """`value` as exactly as anyone sees it: to a tenth of a pixel, or to four significant digits if that is
        finer."""
        digits = 3 - math.floor(math.log10(abs(value))) if value else 0
        if not self.logarithmic:
            digits = max(digits, math.ceil(math.log10(VISIBLE / (self.high - self.low))))
        value = round(value, digits)
        return int(value) if value == int(value) else value


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Contents of a chart."""

    title: str
    unit: str
    """Label of the value axis, e.g. `tokens/s`."""
    series: tuple[Series, ...]
    format: Callable[[float], str]
    """Value -> text, for the description and the table."""
    kind: Literal["lines", "bars"] = "lines"
    from_zero: bool = False
    """Whether the value axis starts at 0."""
    logarithmic: bool = False
    """Whether the value axis is logarithmic if the values span a decade and a half or more."""
    marks: tuple[int, ...] = ()
    """Steps to mark on the step axis."""
    mark_name: str = ""
    changes: tuple[int, ...] = ()
    """Steps after which the plan changed."""
    bands: tuple[Band, ...] = ()
    """In order of steps; those of one name have one tint."""
    axis: str = "step"
    """The quantity on the horizontal axis; every `step` in this module stands for it."""
    axis_range: tuple[float, float] | None = None
    """Ends of that axis; None: it covers the points."""
    height: int = 250
    """Height of the plot with its axes, in pixels."""
    emulated: bool = False
    """Whether the values are modelled times."""
    description: str = ""
    """The chart in words; empty: each curve's ends and extremes."""

    @cached_property
    def values(self) -> ValueAxis:
        """The value axis.

        A few outliers (the first step, a stall) would flatten a curve: if the largest value is more than
        three times the 98th percentile, the axis ends a little above that percentile. Bars are never cut off.
        """
        values = sorted(value for series in self.series for _, value in series.points if math.isfinite(value))
        if not values:
            return ValueAxis(0.0, 1.0)
        low, high = values[0], values[-1]
        if self.logarithmic and low > 0 and high / low > 30:
            return ValueAxis(low / 1.1, high * 1.1, logarithmic=True)
        typical = values[int(0.98 * (len(values) - 1))]
        if self.kind == "lines" and len(values) >= 20 and high > 3 * typical > 0:
            high = 1.3 * typical
        if self.from_zero:
            low, high = 0.0, (high * 1.08 or 1.0)
        else:
            padding = 0.06 * (high - low) or 0.5 * abs(high) or 1.0
            low, high = low - padding, high + padding
        return ValueAxis(low, high, above=sum(value > high for value in values))

    @property
    def tints(self) -> Mapping[str, str]:
        """The name of each tint, in the order of the bands -> the steps that have it: `21–30`."""
        steps: dict[str, list[str]] = {}
        for band in self.bands:
            steps.setdefault(band.name, []).append(band.steps)
        return {
            name: ", ".join(each[:MOST_NAMED]) + (", …" if len(each) > MOST_NAMED else "")
            for name, each in steps.items()
        }

    @property
    def words(self) -> str:
        """The chart in words, for readers who cannot see it."""
        if self.description:
            return self.description
        sentences = [self._series_words(series) for series in self.series]
        sentences += [f"{band.name}: steps {band.first:,} to {band.last:,}." for band in self.bands]
        if self.marks:
            sentences.append(
                f"{self.mark_name}: {', '.join(f'{mark:,}' for mark in self.marks[:MOST_MARKS])}."
            )
        if self.changes:
            sentences.append(f"{self.changes_text}.")
        return f"{self.title}, {self.unit}. " + " ".join(sentences)

    @property
    def marks_text(self) -> str:
        """E.g. `skipped step 88`; lists all steps if they are few."""
        return f"{self.mark_name} {_named(self.marks)}"

    @property
    def changes_text(self) -> str:
        """E.g. `plan changed after step 40`."""
        return f"plan changed after step {_named(self.changes)}"

    def _series_words(self, series: Series) -> str:
        points = [point for point in series.points if math.isfinite(point[1])]
        if not points:
            return f"{series.name}: no values."
        lowest, highest = min(points, key=lambda p: p[1]), max(points, key=lambda p: p[1])
        first, last, low, high = (
            f"{self.format(value)} at {self.axis} {step:,.0f}"
            for step, value in (points[0], points[-1], lowest, highest)
        )
        return f"{series.name}: {first}, {last}; lowest {low}, highest {high}."

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """At most `MOST_ROWS` steps, evenly spread, each with the text of every curve's value there."""
        curves = [dict(series.points) for series in self.series]
        steps = sorted(set().union(*curves))
        common = [step for step in steps if all(step in curve for curve in curves)]
        if len(common) > 1 and not any(series.stepped for series in self.series):
            steps = common
        if len(steps) > MOST_ROWS:
            steps = [steps[round(n * (len(steps) - 1) / (MOST_ROWS - 1))] for n in range(MOST_ROWS)]
        return [
            (
                f"{step:,.6g}",
                *(self._text_at(step, *each) for each in zip(self.series, curves, strict=True)),
            )
            for step in steps
        ]

    def _text_at(self, step: float, series: Series, values: Mapping[float, float]) -> str:
        if step not in values and series.stepped:
            step = max((earlier for earlier in values if earlier <= step), default=step)
        return self.format(values[step]) if step in values else "–"

    @property
    def data(self) -> Mapping[str, object]:
        """The data that `static/charts.js` draws, as JSON values."""
        axis = self.values
        return {
            "kind": self.kind,
            "height": self.height,
            "x": {
                "label": AXIS_LABELS.get(self.axis, self.axis),
                "range": self.axis_range,
                "whole": self.axis == "step",
            },
            "y": {
                "label": f"{self.unit} (log scale)" if axis.logarithmic else self.unit,
                "range": [_short(axis.low), _short(axis.high)],
                "log": axis.logarithmic,
            },
            "series": [_series_data(series, axis) for series in self.series],
            "bands": [[band.first, band.last, list(self.tints).index(band.name)] for band in self.bands],
            "marks": list(self.marks[:MOST_MARKS]),
            "changes": list(self.changes[-MOST_MARKS:]),
        }


def of_times(chart: Chart) -> Chart:
    """`chart`, whose values are seconds, in the unit that suits its value axis: `4 s`, and not `4k ms`."""
    unit, factor = unit_of(chart.values.high)
    series = tuple(
        replace(each, points=tuple((step, factor * value_s) for step, value_s in each.points))
        for each in chart.series
    )
    return replace(chart, unit=f"time, {unit}", series=series)


def _named(steps: Sequence[int]) -> str:
    return ", ".join(f"{step:,}" for step in steps[:MOST_NAMED]) + (", …" if len(steps) > MOST_NAMED else "")


def bins(points: Sequence[Point]) -> list[Bin]:
    """`points` (finite values, ascending) one by one, or if there are many, by `MOST_BINS` equally wide runs of steps.
    Older steps may be fewer, so equally many points would be of unequal width."""
    if len(points) <= MOST_POINTS:
        return [Bin(step, value, value, value) for step, value in points]
    first, width = points[0][0], (points[-1][0] - points[0][0]) / MOST_BINS
    runs = []
    for _, each in groupby(points, lambda point: min(int((point[0] - first) / width), MOST_BINS - 1)):
        run = list(each)
        values = [value for _, value in run]
        runs.append(Bin((run[0][0] + run[-1][0]) / 2, min(values), median(values), max(values)))
    return runs


def _series_data(series: Series, axis: ValueAxis) -> dict[str, object]:
    finite = [point for point in series.points if math.isfinite(point[1])]
    data: dict[str, object] = {"name": series.name}
    if len(finite) > MOST_POINTS:
        shown = bins(finite)
        data |= {
            "x": [_short(part.step) for part in shown],
            "y": [axis.rounded(part.middle) for part in shown],
            "low": [axis.rounded(part.low) for part in shown],
            "high": [axis.rounded(part.high) for part in shown],
        }
    else:
        data["x"] = [_short(step) for step, _ in series.points]
        data["y"] = [axis.rounded(value) if math.isfinite(value) else None for _, value in series.points]
    if series.dots:
        data["dots"] = True
    if series.stepped:
        data["stepped"] = True
    if series.labels:
        data["labels"] = series.labels
    if series.colour:
        data["colour"] = series.colour
    return data


def _short(value: float) -> float:
    """Whole numbers unchanged, others with six significant digits."""
    return int(value) if value == int(value) else float(f"{value:.6g}")
