"""The record of a plan that a search considered. A leaf: event logs and reports contain it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from planner.plan import Plan

if TYPE_CHECKING:
    from planner.search.shapes import PipelineShape


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """One plan that a search considered, or a shape that it did not cut."""

    name: str
    """The origin of the cut: a program, `refined` for one near a program's, `explicit`; empty without a cut."""
    schedule: str
    ranks: int
    microbatches: int
    layers: tuple[tuple[int, int], ...] | None
    """Per stage [first, stop); None without a cut."""
    predicted_step_s: float | None
    """None without a simulation."""
    why_not: str = ""
    """Why the search did not choose it; empty for the chosen plan and for others with the same cut."""

    def order(self, plan: Plan) -> tuple[bool, bool, bool, float]:
        """Sort key: `plan`, then the cuts of its shape, then other shapes; within each, simulated plans come first, and
        the fastest per sample leads."""
        step_s = self.predicted_step_s
        per_microbatch_s = 0.0 if step_s is None else step_s / self.microbatches
        return not self.is_of(plan), not self.has_shape_of(plan), step_s is None, per_microbatch_s

    def is_of(self, plan: Plan) -> bool:
        """Whether it has the shape and the cut of `plan`."""
        return self.layers == plan.layers and self.has_shape_of(plan)

    def has_shape_of(self, plan: Plan) -> bool:
        return (self.schedule, self.ranks, self.microbatches) == (
            plan.schedule,
            plan.pipeline_ranks,
            plan.microbatches,
        )

    @staticmethod
    def uncut(shape: PipelineShape, name: str, why_not: str) -> Alternative:
        """A shape without a simulated cut."""
        return Alternative(
            name=name,
            schedule=shape.name,
            ranks=shape.ranks,
            microbatches=shape.microbatches,
            layers=None,
            predicted_step_s=None,
            why_not=why_not,
        )
