"""Keeps a history bounded: recent steps stay single, older ones share an entry with their neighbours.

Every series of a view is thinned on the same grid, so that their entries are at the same steps. Knows no event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

EVERY = 500
"""Steps from one thinning to the next."""
KEPT = 5_000
"""Most entries, but for those since the last thinning."""
RECENT = 1_000
"""Newest steps that are never thinned."""


@dataclass(frozen=True)
class Grid:
    """Which steps share an entry."""

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

    def bucket(self, step: int) -> int:
        """The last of the steps that `step` shares an entry with. The first step of a job stands alone."""
        last = -(-step // self.stride) * self.stride
        return min(last, self.whole) if 1 < step <= self.whole else step


def thin(
    series: dict[int, T], grid: Grid, merge: Callable[[T, T], T] = lambda earlier, later: later
) -> dict[int, T]:
    """`series`, by step, with one entry per bucket of `grid`, at the last step of the bucket's entries.

    Args:
        merge: makes one entry of two; by default the later one.
    """
    thinned: dict[int, tuple[int, T]] = {}
    for step in sorted(series):
        bucket, entry = grid.bucket(step), series[step]
        if bucket in thinned:
            entry = merge(thinned[bucket][1], entry)
        thinned[bucket] = step, entry
    return dict(thinned.values())


def thin_runs(
    entries: Sequence[T], place: Callable[[T], tuple[object, ...]], merge: Callable[[T, T], T]
) -> list[T]:
    """`entries` with neighbours of the same `place` merged into one."""
    thinned: list[T] = []
    for entry in entries:
        if thinned and place(thinned[-1]) == place(entry):
            thinned[-1] = merge(thinned[-1], entry)
        else:
            thinned.append(entry)
    return thinned


def up_to(series: dict[int, T], step: int) -> dict[int, T]:
    """The entries of `series` up to `step`."""
    if not series or max(series) <= step:
        return series
    return {number: entry for number, entry in series.items() if number <= step}
