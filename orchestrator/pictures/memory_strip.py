"""A rank's memory over a step as a strip in a picture: its uses, stacked. Knows no schedule and no cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from orchestrator.pictures.memory_use import USES, Used, bytes_text

HEIGHT = 36
"""Height of a strip, in pixels."""


@dataclass(frozen=True)
class Area:
    """The memory of one use, over time."""

    name: str
    colour: str
    largest: str
    outline: str
    """The area's SVG path."""


@dataclass(frozen=True)
class Strip:
    """The strip of a rank."""

    top: int
    height: int
    peak: str
    areas: list[Area]
    """The highest first: each reaches down to the bottom, and later ones cover it."""


def strip(levels: Sequence[Used], most: int, end_s: float, *, left: int, top: int, scale: float) -> Strip:
    """The strip of a rank.

    Args:
        levels: from `memory_use.used`.
        most: bytes at full height, the same for all ranks of a picture.
        end_s: time at which the strip ends.
        left: position of time 0, in pixels.
        top: position of the strip's upper edge, in pixels.
        scale: pixels per second.
    """
    bottom, end = top + HEIGHT, left + end_s * scale
    stacked = [(time_s, list(accumulate(sizes))) for time_s, sizes in levels]
    areas = []
    for number in reversed(range(len(USES))):
        largest = max(sizes[number] for _, sizes in levels)
        if not largest:
            continue
        edge = [(left + time_s * scale, bottom - HEIGHT * sums[number] / most) for time_s, sums in stacked]
        use = USES[number]
        areas.append(Area(use.name, use.colour, bytes_text(largest), _outline(edge, end, bottom)))
    return Strip(top, HEIGHT, bytes_text(peak_of(levels)), areas)


def peak_of(levels: Sequence[Used]) -> int:
    """The most bytes of all uses together."""
    return max(sum(sizes) for _, sizes in levels)


def _outline(edge: Sequence[tuple[float, float]], end: float, bottom: float) -> str:
    """The path of the area below a step function, with a corner only where the height changes."""
    x, y = edge[0]
    path = f"M{x:.2f} {bottom}V{y:.2f}"
    for x, following in edge[1:]:
        if following != y:
            path += f"H{x:.2f}V{following:.2f}"
            y = following
    return f"{path}H{end:.2f}V{bottom}Z"
