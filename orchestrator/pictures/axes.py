"""Axes of charts: from values to coordinates, round ticks and their texts. Draws nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """A value axis or a step axis: linear, or logarithmic."""

    low: float
    high: float
    start: float
    """Coordinate of `low`."""
    stop: float
    """Coordinate of `high`."""
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """The coordinate of `value`, held inside the axis."""
        value = min(max(value, self.low), self.high)
        if self.logarithmic:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)

    def ticks(self, most: int) -> list[float]:
        """At most about `most` round values within the axis, ascending."""
        return log_ticks(self.low, self.high, most) if self.logarithmic else ticks(self.low, self.high, most)


def ticks(low: float, high: float, most: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten in [low, high], about `most` of them at the most."""
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Powers of ten in [low, high], with their doubles and quintuples where there is room."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1,)):
        values = [f * 10.0**d for d in decades for f in factors]
        inside = [value for value in values if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
        if len(inside) <= most:
            return inside
    stride = math.ceil(len(inside) / most)
    return inside[::stride]


def tick_text(value: float) -> str:
    """A round number, short: `0.25`, `30k`, `1.5M`."""
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:g}{prefix}"
    return f"{value:g}"


def step_text(step: float) -> str:
    """`1,200`, from a million on `1.2M`: ticks must not run into each other."""
    return f"{step / 1e6:g}M" if step >= 1e6 else f"{step:,.0f}"
