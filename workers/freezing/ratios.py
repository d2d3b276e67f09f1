"""Probabilities that each layer's parameters are frozen in each microbatch of a step, from phases, plan and budgets.

Knows no parameter: of a layer only its weight and how much of that is stable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.freezing import FreezePlan, Phase, Phases
from workers.config import FreezeConfig
from workers.freezing.mask import Chance, topped_up_or_thinned
from workers.freezing.plans import FreezePlans
from workers.protocol.errors import JobError

NEVER, ALWAYS = Chance(0.0, 0.0), Chance(1.0, 1.0)


@dataclass
class Share:
    """The weight of one layer, in what the plan in force weighs by, and the part of it that is stable."""

    stable: int
    weight: int


def phases_of(config: FreezeConfig) -> Phases | None:
    """The job's phases; None for a method without a freeze program.

    Raises:
        JobError: they were not resolved, or are out of order.
    """
    if config.warm_up is None and "warm_up" in config.used:
        raise JobError("freeze.warm_up is not resolved: give it a number of steps")
    if not config.timely:
        return None
    if config.monitoring is None or config.ramp is None:
        raise JobError(
            f"freeze.method is {config.method!r}, but freeze.monitoring or freeze.ramp is not resolved: give them"
            " numbers of steps"
        )
    try:
        return config.phases
    except ValueError as error:
        raise JobError(f"[freeze]: {error}") from error


class Budgets:
    """The chances of each (layer, microbatch of a replica).

    Args:
        hybrid: whether a metric chooses what a plan's budgets are spent on.
        by_layer: whether each layer has a budget of its own, whatever the plan says of stages.
        shares: of all the model's layers, in order; only a hybrid needs them. Live: they change at checks, and with
            the plan.
    """

    def __init__(
        self,
        phases: Phases | None,
        plans: FreezePlans,
        *,
        hybrid: bool,
        by_layer: bool = False,
        shares: Sequence[Share] = (),
    ) -> None:
        self._phases = phases
        self._plans = plans
        self._hybrid = hybrid
        self._by_layer = by_layer
        self._shares = shares

    def chances(self, step: int, layer: int, microbatches: int) -> tuple[Chance, ...]:
        """Per microbatch, how likely the parameters of `layer` are frozen in `step` (1 is the job's first)."""
        if self._phases is None:
            return (Chance(1.0, 0.0),) * microbatches
        phase = self._phases.of(step)
        plan = self._plans.at(step)
        if phase is Phase.LOWER:
            return (ALWAYS,) * microbatches
        if plan is None or phase not in (Phase.RAMP, Phase.STABLE):
            return (NEVER,) * microbatches
        share = self._phases.share(step)
        if not self._hybrid:
            return tuple(Chance(ratio * share, ratio * share) for ratio in plan.ratios[layer])
        return tuple(self._spread(plan, layer, m, share) for m in range(microbatches))

    def _spread(self, plan: FreezePlan, layer: int, microbatch: int, share: float) -> Chance:
        """The budget of the layer's stage, spread by what is stable there. What weighs nothing has its own ratio."""
        stages = () if self._by_layer else plan.stages
        first, stop = next((r for r in stages if r[0] <= layer < r[1]), (layer, layer + 1))
        weight = sum(self._shares[other].weight for other in range(first, stop))
        if not weight:
            own = share * plan.ratios[layer][microbatch]
            return Chance(own, own)
        budget = sum(self._shares[o].weight * plan.ratios[o][microbatch] for o in range(first, stop))
        if not budget:
            return NEVER
        stable = sum(self._shares[other].stable for other in range(first, stop))
        return topped_up_or_thinned(share * budget / weight, stable / weight)
