"""What is told of a plan that a search looked at. A leaf: event logs and reports carry it."""

from __future__ import annotations

from dataclasses import dataclass

from planner.plan import Plan
from planner.search.shapes import Shape


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """One plan that was looked at, or a shape that was not cut."""

    name: str
    """Where the cut comes from: a program, `refined` for one near a program's, `explicit`; empty without a cut."""
    schedule: str
    ranks: int
    microbatches: int
    layers: tuple[tuple[int, int], ...] | None
    """Per stage [first, stop); None: nothing was cut."""
    predicted_step_s: float | None
    """None: not simulated."""
    why_not: str = ""
    """Why it was not taken; empty for the one that was, and for others that cut alike."""

    def order(self, plan: Plan) -> tuple[bool, bool, bool, float]:
        """Sorts `plan` first, then what was cut for its shape, so each program's own pick, then other shapes; of each
        what was simulated first, the most samples per second before the others."""
        step_s = self.predicted_step_s
        per_microbatch_s = 0.0 if step_s is None else step_s / self.microbatches
        return not self.is_of(plan), not self.has_shape_of(plan), step_s is None, per_microbatch_s

    def is_of(self, plan: Plan) -> bool:
        """Whether it is `plan`, or cuts alike."""
        return self.layers == plan.layers and self.has_shape_of(plan)

    def has_shape_of(self, plan: Plan) -> bool:
        return (self.schedule, self.ranks, self.microbatches) == (
            plan.schedule,
            plan.pipeline_ranks,
            plan.microbatches,
        )

    @staticmethod
    def uncut(shape: Shape, name: str, why_not: str) -> Alternative:
        """A shape of which no cut was simulated."""
        return Alternative(
            name=name,
            schedule=shape.name,
            ranks=shape.ranks,
            microbatches=shape.microbatches,
            layers=None,
            predicted_step_s=None,
            why_not=why_not,
        )
