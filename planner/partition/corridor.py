"""Where the boundaries of a cut can lie if no stage takes longer than a limit: exact bounds that keep programs small.

A thousand layers in sixty stages have half a million ranges, of which a stage near the optimum is one of a few hundred.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import pairwise

from planner.partition.stage_costs import Matrix, Window

_SLACKS = (0.01, 0.05, 0.2, 0.6, 2.0)
"""Relative slacks over the least conceivable limit to try, before there is none."""
_HALVINGS = 20
_ROUNDING = 1e-9
"""Relative: sums in different orders differ by less."""


def corridors(layers: int, stages: int, least: Matrix | None) -> Iterator[tuple[float, list[Window]]]:
    """Yield (limit, window per stage) with wider and wider limits, the last of them infinite. Every cut whose stages
    all cost at most the limit lies within the windows.

    Args:
        least: float64[S, L + 1], nondecreasing: stage s with the layers [first, stop) costs at least
            `least[s, stop] - least[s, first]`. None: nothing is known.
    """
    if least is not None:
        sums = [row.tolist() for row in least]
        lowest = _lowest(layers, sums)
        for slack in _SLACKS:
            limit = lowest * (1 + slack)
            if limit > 0 and (windows := _windows(layers, sums, limit)) is not None:
                yield limit, windows
    yield float("inf"), [window(layers, stages, stage) for stage in range(stages)]


def window(layers: int, stages: int, stage: int) -> Window:
    """Where stage `stage` can end and start, if every stage has a layer."""
    after = stages - stage - 1
    firsts = slice(0, 1) if stage == 0 else slice(stage, layers - after)
    stops = slice(layers, layers + 1) if after == 0 else slice(stage + 1, layers - after + 1)
    return stops, firsts


def _lowest(layers: int, sums: list[list[float]]) -> float:
    """About the lowest limit under which the stages reach the last layer; not above it by more than rounding."""
    high = max(row[-1] for row in sums) / len(sums)
    low = 0.0
    while _reach(layers, sums, high)[-1] < layers:
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _reach(layers, sums, middle)[-1] < layers:
            low = middle
        else:
            high = middle
    return high


def _reach(layers: int, sums: list[list[float]], limit: float) -> list[int]:
    """The last layer before which each stage can begin, and the last one can end; each stage has a layer."""
    stages = len(sums)
    reached = [0]
    for stage, row in enumerate(sums):
        stop = bisect_right(row, row[reached[-1]] + _loose(limit, row)) - 1
        reached.append(min(stop, layers - (stages - stage - 1)))
        if reached[-1] <= stage:
            return [*reached, 0]
    return reached


def _windows(layers: int, sums: list[list[float]], limit: float) -> list[Window] | None:
    """None: the stages do not reach the last layer."""
    highest = _reach(layers, sums, limit)
    if highest[-1] < layers:
        return None
    lowest = [layers]
    for stage in reversed(range(len(sums))):
        row = sums[stage]
        lowest.append(max(stage, bisect_left(row, row[lowest[-1]] - _loose(limit, row))))
    lowest.reverse()
    bounds = list(zip(lowest, highest, strict=True))
    bounds[0] = 0, 0
    if any(low > high for low, high in bounds):
        return None
    return [
        (slice(stops[0], stops[1] + 1), slice(firsts[0], firsts[1] + 1)) for firsts, stops in pairwise(bounds)
    ]


def _loose(limit: float, row: list[float]) -> float:
    return limit * (1 + _ROUNDING) + _ROUNDING * 1e-3 * row[-1]
