"""Memory limits as constraints of a partition program: they exclude stages that do not fit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from planner.partition import memory
from planner.partition.stage_costs import Matrix, Ranges, StageCosts, Window
from planner.plan import PlanError
from planner.wording import counted


def within_limits(
    costs: StageCosts,
    limited: bool,
    solve: Callable[[Callable[[int, Window], Matrix]], Ranges | None],
    cost: Callable[[int, Window], Matrix],
) -> Ranges:
    """The cut that `solve` finds, with infinite costs where a stage does not fit its device.

    Raises:
        PlanError: no cut fits; says how much memory the closest one lacks.
    """

    def allowed(stage: int, at: Window) -> Matrix:
        within = cost(stage, at)
        within[costs.memory_bytes(stage, at) > costs.limit_bytes(stage)] = np.inf
        return within

    ranges = solve(allowed if limited else cost)
    if ranges is None:
        raise PlanError(f"no cut into {counted(costs.stages, 'stage')} fits the memory: {_nearest(costs)}")
    return ranges


def _nearest(costs: StageCosts) -> str:
    """Excess of the cut of balanced memory over its limit, at its worst stage, in words."""
    ranges = memory.partition(costs)

    def excess(stage: int) -> float:
        first, stop = ranges[stage]
        return costs.memory_bytes(stage)[stop, first] - costs.limit_bytes(stage)

    stage = max(range(costs.stages), key=excess)
    return (
        f"with memory balanced, stage {stage} (layers {ranges[stage][0]} to {ranges[stage][1] - 1}) on rank"
        f" {costs.stage_ranks[stage]} still needs {excess(stage):,.0f} bytes more than the"
        f" {costs.limit_bytes(stage):,.0f} it may use"
    )
