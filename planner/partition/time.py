"""Time partition: minimizes the longest stage time, forward plus backward of one microbatch.

The heuristic for throughput (TimelyFreeze, appendix G.1). It ignores communication, unlike `bottleneck`.
"""

from __future__ import annotations

from planner.partition.limits import within_limits
from planner.partition.minmax import smallest_largest
from planner.partition.stage_costs import Ranges, StageCosts


def partition(costs: StageCosts, *, limited: bool = True) -> Ranges:
    """The layers of each stage as [first, stop), each on its own device with its slowdown.

    Args:
        limited: whether every stage must fit its device's memory.

    Raises:
        ValueError: more stages than layers.
        PlanError: no cut fits the memory.
    """
    return within_limits(
        costs,
        limited,
        lambda cost: smallest_largest(costs.layers, costs.stages, cost, costs.least_s),
        costs.time_s,
    )
