"""What is told of a plan that a search looked at. A leaf: event logs and reports carry it."""

from __future__ import annotations

from dataclasses import dataclass

from planner.shapes import Shape


@dataclass(frozen=True, kw_only=True)
class Considered:
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

    @staticmethod
    def uncut(shape: Shape, name: str, why_not: str) -> Considered:
        """A shape of which no cut was simulated."""
        return Considered(
            name=name,
            schedule=shape.name,
            ranks=shape.ranks,
            microbatches=shape.microbatches,
            layers=None,
            predicted_step_s=None,
            why_not=why_not,
        )
