"""Choice of the layers that recompute: as few as memory allows, where plans must be smaller. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from planner.ir import Schedule
from planner.plan import Plan, recomputable
from planner.simulation.predict import Prediction, predict


def every_recompute(plan: Plan) -> tuple[int, ...]:
    """All layers that may recompute, and those of `plan` that do."""
    return tuple(sorted({*recomputable(plan.layers[-1][1]), *plan.recompute}))


def least_recompute(
    found: Prediction, always: Collection[int], schedule_of: Callable[[Plan], Schedule]
) -> Prediction:
    """The prediction of the plan of `found` in which only stages recompute that would not fit otherwise, besides the
    layers that `always` do.

    Args:
        found: of a plan that fits the memory.
    """
    for first, stop in found.plan.layers:
        kept = tuple(layer for layer in found.plan.recompute if layer in always or not first <= layer < stop)
        if kept != found.plan.recompute:
            plan = replace(found.plan, recompute=kept)
            without = predict(found.profile, plan, schedule_of(plan), found.ratios)
            if without.fits:
                found = without
    return found
