"""DynPipe's partition (section IV-C2): the cut with the shortest iteration by eq. 4-5, as corrected.

The stages before the last count as one merged stage with their own iteration time. This averages, and so hides an
early bottleneck: `planner/search/search.py` simulates this cut and others. Each stage has one device here, as in the
engine; in `search/end_to_end.py` a stage may have several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from planner.partition.corridor import corridors
from planner.partition.limits import within_limits
from planner.partition.minmax import backtrack, check_stages, legal
from planner.partition.stage_costs import Matrix, Ranges, StageCosts, Vector, Window
from planner.profile import Link


def partition(costs: StageCosts, *, limited: bool = True) -> Ranges:
    """The layers of each stage as [first, stop), for as many stages as `costs` has.

    Args:
        limited: whether every stage must fit its device's memory.

    Raises:
        ValueError: more stages than layers.
        PlanError: no cut fits the memory.
    """
    check_stages(costs.layers, costs.stages)
    return within_limits(costs, limited, lambda cost: _shortest(costs, cost), costs.time_s)


def iteration_s(costs: StageCosts, ranges: Ranges) -> float:
    """W of a given cut."""
    merged = 0.0
    for stage, (first, stop) in enumerate(ranges):
        last = costs.time_s(stage)[stop, first]
        merged = float(merge(merged, last, communication_s(costs, stage)[first])) if stage else float(last)
    return merged


def merge(before: Vector | float, last: Matrix | float, communication: Vector | float) -> Matrix:
    """Eq. 4 and 5 with the case they lack: W = max(W_prev, W_last, (c + W_prev + W_last) / 2), seconds.

    Without this case, a bottleneck in the first stage would count half.
    """
    merged = np.asarray((communication + before) / 2 + np.multiply(last, 0.5))
    np.maximum(merged, before, out=merged)
    return np.maximum(merged, last, out=merged)


def communication_s(costs: StageCosts, stage: int) -> Vector:
    """c of eq. 7 for every cut before `stage` > 0, with one device on either side: A + G over the lower bandwidth of
    the two directions; 0 within a rank."""
    there, back = costs.link(stage - 1, stage), costs.link(stage, stage - 1)
    if there is None or back is None:
        return np.zeros(costs.layers + 1)
    return Link.slowest((there, back)).link_busy_s(costs.forward_bytes + costs.backward_bytes)


def _shortest(costs: StageCosts, cost: Callable[[int, Window], Matrix]) -> Ranges | None:
    """The dynamic program of eq. 5: exact, as W grows with W_prev and c depends on the last cut only."""
    for limit, windows in corridors(costs.layers, costs.stages, costs.least_s):
        # No stage takes longer than W.
        found = _shortest_within(costs, cost, windows, limit)
        if found is not None:
            return found
    return None


def _shortest_within(
    costs: StageCosts, cost: Callable[[int, Window], Matrix], windows: Sequence[Window], limit: float
) -> Ranges | None:
    """Result of `_shortest` among the cuts within `windows`; None if W of all of them exceeds `limit`."""
    layers = costs.layers
    merged = np.zeros(layers + 1)
    begins: list[np.ndarray] = []
    for stage, at in enumerate(windows):
        stops, firsts = at
        last = legal(cost(stage, at), at)
        reached = merge(merged[firsts], last, communication_s(costs, stage)[firsts]) if stage else last
        chosen = reached.argmin(axis=1)
        merged = np.full(layers + 1, np.inf)
        merged[stops] = reached[np.arange(len(chosen)), chosen]
        begin = np.zeros(layers + 1, dtype=np.int64)
        begin[stops] = chosen + firsts.start
        begins.append(begin)
    found = merged[layers]
    return backtrack(begins, layers) if np.isfinite(found) and found <= limit else None
