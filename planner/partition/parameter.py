"""Parameter partition: contiguous stages whose parameter counts are as equal as possible. Knows no times, no memory.

The simplest of the three heuristics that TimelyFreeze compares (appendix G.1). It needs no profile: the count stands
for compute and memory.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from planner.partition.minmax import check_stages


def partition(parameter_counts: Sequence[int], stages: int) -> tuple[tuple[int, int], ...]:
    """The layers of each stage as [first, stop): minimizes the largest stage.

    Of the cuts that reach this minimum it takes the one with the least sum of squared stage sizes; of those, the one
    with the fewest layers in the first stage, then in the second, and so on, as earlier stages hold more microbatches.

    Args:
        parameter_counts: per layer, 0 or more.
        stages: how many, each of at least one layer.

    Raises:
        ValueError: more stages than layers, or no stage.
    """
    layers = len(parameter_counts)
    check_stages(layers, stages)
    limit = _least_largest(parameter_counts, stages)
    sums = [0, *accumulate(parameter_counts)]

    # cost[first] is the least sum of squares of cutting layers first.. into the stages placed so far, from
    # the last stage to the first; stops remembers where the first of them ends.
    cost: list[int | None] = [None] * layers + [0]
    stops: list[list[int]] = []
    least, most = _bounds(sums, stages, limit)
    for stage in reversed(range(stages)):
        best: list[int | None] = [None] * (layers + 1)
        stop_at = [layers] * (layers + 1)
        for first in range(least[stage], most[stage] + 1):
            for stop in range(first + 1, layers + 1):
                size = sums[stop] - sums[first]
                if size > limit:
                    break
                rest = cost[stop]
                if rest is not None and ((known := best[first]) is None or size * size + rest < known):
                    best[first], stop_at[first] = size * size + rest, stop
        cost = best
        stops.append(stop_at)

    ranges: list[tuple[int, int]] = []
    first = 0
    for stop_at in reversed(stops):
        ranges.append((first, stop_at[first]))
        first = stop_at[first]
    return tuple(ranges)


def _bounds(sums: Sequence[int], stages: int, limit: int) -> tuple[list[int], list[int]]:
    """(per stage, the first layer at which it can begin if none exceeds `limit`; per stage, the last one)."""
    layers = len(sums) - 1
    most, least = [0], [layers]
    for stage in range(1, stages):
        reached = bisect_right(sums, sums[most[-1]] + limit) - 1
        most.append(min(reached, layers - stages + stage))
    for stage in reversed(range(stages)):
        least.append(max(stage, bisect_left(sums, sums[least[-1]] - limit)))
    return least[:0:-1], most


def _least_largest(parameter_counts: Sequence[int], stages: int) -> int:
    """The least size that the largest of `stages` contiguous stages can have."""

    def fits(limit: int) -> bool:
        needed, size = 1, 0
        for count in parameter_counts:
            if size + count > limit:
                needed, size = needed + 1, 0
            size += count
        return needed <= stages

    largest, total = max(parameter_counts), sum(parameter_counts)
    return largest + bisect_left(range(largest, total + 1), True, key=fits)
