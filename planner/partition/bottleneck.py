"""Bottleneck partition: the slowest resource of the pipeline, rank or link, is as fast as can be.

What bounds the steady state: a rank works for one microbatch on its layers and on the messages it hands over and
takes in, a link carries one message at a time, and each direction is a link of its own.
"""

from __future__ import annotations

import numpy as np

from planner.partition.limits import within_limits
from planner.partition.minmax import smallest_largest
from planner.partition.stage_costs import WHOLE, Matrix, Ranges, StageCosts, Window


def partition(costs: StageCosts, *, limited: bool = True) -> Ranges:
    """The layers of each stage as [first, stop). Exact for any links and slowdowns.

    Args:
        limited: whether every stage must fit its device's memory.

    Raises:
        ValueError: more stages than layers.
        PlanError: no cut fits the memory.
    """
    return within_limits(
        costs,
        limited,
        lambda cost: smallest_largest(costs.layers, costs.stages, cost),
        lambda stage, at: stage_s(costs, stage, at),
    )


def stage_s(costs: StageCosts, stage: int, at: Window = WHOLE) -> Matrix:
    """Per run of layers, the longer of the rank's own time and the links' to the stage before."""
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
            there, back = (
                arriving.link_busy_s(costs.forward_bytes),
                leaving.link_busy_s(costs.backward_bytes),
            )
            np.maximum(own, np.maximum(there, back)[firsts], out=own)
    return own
