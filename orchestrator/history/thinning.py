"""Keeps a history bounded: recent steps stay single, older ones share an entry with their neighbours.

Every series of a view is thinned on the same grid, so that their entries are at the same steps. Knows no event.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")

EVERY = 500
"""Steps from one thinning to the next."""
KEPT = 5_000
"""Most entries, but for those since the last thinning."""
RECENT = 1_000
"""Newest steps that are never thinned."""


@dataclass(frozen=True)
class Grid:
    """Grid of the steps that share an entry."""

    stride: int
    whole: int
    """Later steps stand alone."""

    @staticmethod
    def at(newest: int, *, recent: int = RECENT, kept: int = KEPT) -> Grid:
        """The grid of a job that has committed `newest` steps: `kept` entries, of which `recent` or more are single
        steps."""
        if newest <= kept:
            return Grid(1, 0)
        stride = 2
        while newest - recent > stride * (kept - recent):
            stride *= 2
        # whole / stride + (newest - whole) = kept
        return Grid(stride, -(-(newest - kept) * stride // (stride - 1)))

    def buckets(self, steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """For each of `steps` the last that it shares an entry with. The first step of a job stands alone."""
        last = np.minimum(-(-steps // self.stride) * self.stride, self.whole)
        return np.where((steps > 1) & (steps <= self.whole), last, steps)


def thin(
    series: dict[int, T], grid: Grid, merge: Callable[[T, T], T] = lambda earlier, later: later
) -> dict[int, T]:
    """`series`, by step, with one entry per bucket of `grid`, at the last step of the bucket's entries.

    Args:
        merge: makes one entry of two; by default the later one.
    """
    thinned = {step: series[step] for step in sorted(series)}
    steps = np.fromiter(thinned, np.int64, len(thinned))
    for place in same_as_next(grid.buckets(steps)):
        earlier, later = int(steps[place]), int(steps[place + 1])
        thinned[later] = merge(thinned.pop(earlier), thinned[later])
    return thinned


def same_as_next(*columns: NDArray[np.int64]) -> list[int]:
    """The places at which each of `columns` has the value of the next place."""
    same = [column[1:] == column[:-1] for column in columns]
    return np.flatnonzero(np.logical_and.reduce(same)).tolist()


def up_to(series: dict[int, T], step: int) -> dict[int, T]:
    """The entries of `series` up to `step`."""
    if not series or max(series) <= step:
        return series
    return {number: entry for number, entry in series.items() if number <= step}
