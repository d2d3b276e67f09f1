"""Memory partition: peak activations plus weights, gradients and optimizer state, balanced over the devices.

The heuristic for training near the memory limit (TimelyFreeze, appendix G.1). Knows no times.
"""

from __future__ import annotations

import numpy as np

from planner.partition.minmax import smallest_largest
from planner.partition.stage_costs import Ranges, StageCosts


def partition(costs: StageCosts) -> Ranges:
    """The layers of each stage as [first, stop): minimizes the largest share of a device's memory in use. Earlier
    stages hold more microbatches, and so get fewer layers.

    There is no limit: with one stage per rank, if this cut does not fit, none does.

    Raises:
        ValueError: more stages than layers.
    """
    ranges = smallest_largest(
        costs.layers,
        costs.stages,
        lambda stage, at: costs.memory_bytes(stage, at) / costs.limit_bytes(stage),
        np.stack([costs.least_bytes(stage) / costs.limit_bytes(stage) for stage in range(costs.stages)]),
    )
    assert ranges is not None
    return ranges
