"""Bottleneck partition: minimizes the time that one microbatch keeps the busiest resource, rank or link, busy.

This time bounds the steady state. A rank works on the layers of all its stages and on the messages that it sends and
receives. A link carries one message at a time, and each direction is a separate link.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from planner.partition.limits import within_limits
from planner.partition.minmax import smallest_largest
from planner.partition.rank_sums import RankSums, searchable
from planner.partition.stage_costs import WHOLE, Matrix, Ranges, StageCosts, Window


def partition(costs: StageCosts, *, limited: bool = True) -> Ranges:
    """The layers of each stage as [first, stop).

    Exact for any links and slowdowns with one stage per rank. With several stages per rank it is exact while the model
    has at most `rank_sums.MOST_CUTS` cuts. For larger models it minimizes the busiest single stage or link instead.

    Args:
        limited: whether every stage must fit its device's memory.

    Raises:
        ValueError: more stages than layers.
        PlanError: no cut fits the memory.
    """
    return within_limits(
        costs,
        limited,
        lambda cost: _least(costs, cost),
        lambda stage, at: stage_s(costs, stage, at),
    )


def _least(costs: StageCosts, cost: Callable[[int, Window], Matrix]) -> Ranges | None:
    """`cost`: as `stage_s`, infinite where the stage does not fit."""
    known = smallest_largest(costs.layers, costs.stages, cost, costs.least_s)
    if known is None or not searchable(costs):
        return known
    sums = RankSums(costs, lambda stage: rank_s(costs, stage))
    return sums.least(lambda stage: np.isfinite(cost(stage, WHOLE)), known)


def stage_s(costs: StageCosts, stage: int, at: Window = WHOLE) -> Matrix:
    """Per layer range, the longest of the rank's own time and the times of the links to the previous stage."""
    own = rank_s(costs, stage, at)
    if stage > 0:
        arriving, leaving = costs.link(stage - 1, stage), costs.link(stage, stage - 1)
        if arriving is not None and leaving is not None:
            there, back = (
                arriving.link_busy_s(costs.forward_bytes),
                leaving.link_busy_s(costs.backward_bytes),
            )
            np.maximum(own, np.maximum(there, back)[at[1]], out=own)
    return own


def rank_s(costs: StageCosts, stage: int, at: Window = WHOLE) -> Matrix:
    """Per layer range, seconds that it keeps the stage's rank busy: computation, messages sent and received."""
    stops, firsts = at
    own = costs.time_s(stage, at)
    if stage + 1 < costs.stages:
        leaving, arriving = costs.link(stage, stage + 1), costs.link(stage + 1, stage)
        if leaving is not None and arriving is not None:
            handed = leaving.sender_busy_s(costs.forward_bytes) + arriving.receiver_busy_s(
                costs.backward_bytes
            )
            own += handed[stops, None]
    if stage > 0:
        arriving, leaving = costs.link(stage - 1, stage), costs.link(stage, stage - 1)
        if arriving is not None and leaving is not None:
            taken = arriving.receiver_busy_s(costs.forward_bytes) + leaving.sender_busy_s(
                costs.backward_bytes
            )
            own += taken[firsts]
    return own
