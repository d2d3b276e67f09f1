"""Dynamic program for the cut that minimizes the largest stage cost, in any unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from planner.partition.corridor import corridors
from planner.partition.stage_costs import Matrix, Ranges, Window
from planner.wording import counted

_KEPT = 2**22
"""Number of costs that stay in memory between the two passes."""


def smallest_largest(
    layers: int, stages: int, cost: Callable[[int, Window], Matrix], least: Matrix | None = None
) -> Ranges | None:
    """The cut with the smallest largest stage cost; of those, the one with the least sum of squared costs.

    Exact for any costs, in O(stages x layers^2); where `least` says how little a range can cost, only for the ranges
    that a cut near the optimum can have.

    Args:
        cost: (stage, window) -> a new matrix with its cost, 0 or more, for every layer range in the window; infinite
            where the range is not allowed.
        least: as `corridors` has it.

    Returns:
        The cut; None if none is allowed.

    Raises:
        ValueError: more stages than layers, or no stage.
    """
    check_stages(layers, stages)
    for limit, windows in corridors(layers, stages, least):
        found = _smallest_largest(layers, windows, cost, limit)
        if found is not None:
            return found
    return None


def _smallest_largest(
    layers: int, windows: Sequence[Window], cost: Callable[[int, Window], Matrix], limit: float
) -> Ranges | None:
    """Result of `smallest_largest` among the cuts within `windows`; None if each has a stage that exceeds `limit`."""
    # largest[stop]: the largest cost of the stages so far, which end before layer `stop`.
    largest = np.full(layers + 1, np.inf)
    largest[0] = 0.0
    known: dict[int, Matrix] = {}
    room = _KEPT
    for stage, at in enumerate(windows):
        stops, firsts = at
        own = legal(cost(stage, at), at)
        if own.size <= room:
            known[stage] = own
            room -= own.size
        reached = np.maximum(own, largest[firsts])
        largest = np.full(layers + 1, np.inf)
        largest[stops] = reached.min(axis=1)
    if not np.isfinite(largest[layers]) or largest[layers] > limit:
        return None

    limit = largest[layers] * (1 + 1e-12)
    squares = np.full(layers + 1, np.inf)
    squares[0] = 0.0
    begins: list[np.ndarray] = []
    for stage, at in enumerate(windows):
        stops, firsts = at
        total = known.pop(stage, None)
        if total is None:
            total = legal(cost(stage, at), at)
        total[total > limit] = np.inf
        np.square(total, out=total)
        total += squares[firsts]
        chosen = total.argmin(axis=1)
        squares = np.full(layers + 1, np.inf)
        squares[stops] = total[np.arange(len(chosen)), chosen]
        begin = np.zeros(layers + 1, dtype=np.int64)
        begin[stops] = chosen + firsts.start
        begins.append(begin)
    return backtrack(begins, layers)


def check_stages(layers: int, stages: int) -> None:
    """Check that every stage can have a layer.

    Raises:
        ValueError: there are more stages than layers, or no stage.
    """
    if not 1 <= stages <= layers:
        raise ValueError(
            f"cannot cut {counted(layers, 'layer')} into {counted(stages, 'stage')} of at least one layer:"
            f" use at most {counted(layers, 'stage')} (fewer ranks or chunks), or a model with more layers"
        )


def backtrack(begins: list[np.ndarray], layers: int) -> Ranges:
    """The layers of each stage, from `begins[stage][stop]`: the first layer of a stage that ends at `stop`."""
    ranges: list[tuple[int, int]] = []
    stop = layers
    for begin in reversed(begins):
        ranges.append((int(begin[stop]), stop))
        stop = int(begin[stop])
    return tuple(reversed(ranges))


def legal(cost: Matrix, at: Window) -> Matrix:
    """`cost`, changed in place to be infinite where the stage would be empty."""
    stops, firsts = at
    cost[np.arange(firsts.start, firsts.stop) >= np.arange(stops.start, stops.stop)[:, None]] = np.inf
    return cost
