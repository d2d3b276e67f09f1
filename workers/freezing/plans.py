"""The freeze plans that a rank follows: which one, and which settings, are in force at a step. Knows no draw and no
layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.freezing import FreezePlan
from workers.config import FreezeConfig
from workers.protocol.errors import JobError


class FreezePlans:
    """Plans by the step they start at.

    Args:
        known: with their `start`, from the log; any that is adopted later is newer.
    """

    def __init__(self, known: Sequence[FreezePlan] = ()) -> None:
        without = [f"{plan.epoch}.{plan.version}" for plan in known if plan.start is None]
        assert not without, f"plans {without} have no start"
        self._plans = sorted(known, key=lambda plan: (plan.start, *plan.key))

    @property
    def known(self) -> tuple[FreezePlan, ...]:
        """All of them, by start."""
        return tuple(self._plans)

    def at(self, step: int) -> FreezePlan | None:
        """The plan in force at `step` (1 is the job's first); None before the first one starts."""
        begun = [plan for plan in self._plans if plan.start is not None and plan.start <= step]
        return begun[-1] if begun else None

    def controlled(self, step: int) -> bool:
        """Whether a request has changed the settings by `step`."""
        begun = (plan for plan in self._plans if plan.start is not None and plan.start <= step)
        return any(plan.control is not None for plan in begun)

    def all_begun(self, step: int) -> bool:
        """Whether every plan known is in force, or was, at `step`."""
        return all(plan.start is not None and plan.start <= step for plan in self._plans)

    @property
    def newest(self) -> tuple[int, int] | None:
        """Epoch and version of the newest plan."""
        return max((plan.key for plan in self._plans), default=None)

    def adopt(self, plan: FreezePlan, start: int) -> FreezePlan:
        """Follow `plan` from `start` on; returns it with its start."""
        started = replace(plan, start=start)
        self._plans.append(started)
        return started


@dataclass(frozen=True)
class FreezeSettings:
    """The `[freeze]` section in force at each step."""

    spec: FreezeConfig
    """The job's own."""
    plans: FreezePlans
    """Live."""

    def at(self, step: int) -> FreezeConfig:
        """The section that `step` (1 is the job's first) follows."""
        plan = self.plans.at(step)
        return self.spec if plan is None else self.spec.model_copy(update=plan.settings)


def check_plan(plan: FreezePlan, spec: FreezeConfig, layers: int, microbatches: int) -> None:
    """Raises:
    JobError: the job's method uses no ratios, the table of ratios is not one per layer and microbatch, a ratio is
        outside [0, 1], or the weights are not one row per layer.
    """
    if plan.control is None and not spec.timely:
        raise JobError(
            f"freeze.method is {spec.method!r}, which follows no ratios: use a `timelyfreeze` method"
        )
    if len(plan.ratios) != layers or any(len(row) != microbatches for row in plan.ratios):
        rows = sorted({len(row) for row in plan.ratios})
        raise JobError(
            f"freeze plan {plan.epoch}.{plan.version} has ratios for {len(plan.ratios)} layers and"
            f" {rows} microbatches; the job has {layers} layers and {microbatches} microbatches"
        )
    odd = sorted({ratio for row in plan.ratios for ratio in row if not 0.0 <= ratio <= 1.0})
    if odd:
        raise JobError(f"freeze plan {plan.epoch}.{plan.version} has ratios outside [0, 1]: {odd[:3]}")
    if plan.weights and len(plan.weights) != layers:
        raise JobError(
            f"freeze plan {plan.epoch}.{plan.version} has weights for {len(plan.weights)} layers; the job has {layers}"
        )
