"""PipeTransformer's partition (Algorithm 1, as corrected in NOTES): greedy by size, where frozen layers count less.

The paper's slips that are mended: frozen layers count, at `frozen_cost`; the slack is a standard deviation, as a
variance has squared units; a stage may be exactly as large as its limit; the last one takes what is left. Frozen layers
that are more than the first stage's part go on in the next one: all on the first stage, they would forbid the second
halving of the paper's pipelines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import pstdev

from planner.partition.minmax import check_stages
from planner.partition.stage_costs import Ranges

ROUNDING = 1e-9
"""Share of a limit by which sums of sizes may miss it."""


def partition(sizes: Sequence[float], stages: int, *, frozen: int = 0, frozen_cost: float = 1.0) -> Ranges:
    """The layers of each stage as [first, stop).

    Args:
        sizes: per layer, such as its parameters.
        stages: how many, each of at least one layer.
        frozen: layers frozen from the input up.
        frozen_cost: size of a frozen layer over that of a trained one, lambda.

    Raises:
        ValueError: more stages than layers.
    """
    check_stages(len(sizes), stages)
    counted = counted_sizes(sizes, frozen=frozen, frozen_cost=frozen_cost)
    left, first = sum(counted), 0
    ranges: list[tuple[int, int]] = []
    for stage in range(stages):
        after = stages - stage - 1
        limit = (left + pstdev(counted[first:])) / (after + 1) * (1 + ROUNDING)
        stop, size = first + 1, counted[first]
        while len(sizes) - stop > after and (not after or size + counted[stop] <= limit):
            size += counted[stop]
            stop += 1
        ranges.append((first, stop))
        first, left = stop, left - size
    return tuple(ranges)


def counted_sizes(sizes: Sequence[float], *, frozen: int, frozen_cost: float) -> list[float]:
    """Sizes per layer as Algorithm 1 counts them: of a frozen layer, the `frozen_cost`-th part."""
    return [size * (frozen_cost if layer < frozen else 1.0) for layer, size in enumerate(sizes)]


def compressed(ranks: int, fits: Callable[[int], bool]) -> int:
    """The ranks of a pipeline that is halved while the halved one fits (eq. 2); of an odd number, the smaller half.

    Args:
        fits: whether a pipeline of so many ranks does.
    """
    while ranks > 1 and fits(ranks // 2):
        ranks //= 2
    return ranks
