"""One cut of one shape, as the search compares it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from planner.partition.stage_costs import Ranges
from planner.search.alternatives import Alternative
from planner.search.evaluate import Evaluator
from planner.simulation.predict import Prediction

_ROUNDED = 0.0005
"""A smaller relative difference would print as 0.0%."""


@dataclass(frozen=True)
class Candidate:
    """A cut of a shape."""

    evaluator: Evaluator
    name: str
    layers: Ranges

    @property
    def prediction(self) -> Prediction:
        return self.evaluator.predict(self.layers)

    @property
    def per_microbatch_s(self) -> float:
        """The measure between shapes: each microbatch has the same number of samples."""
        return self.prediction.step_s / self.evaluator.shape.microbatches

    @property
    def fits(self) -> bool:
        return self.evaluator.excess_bytes(self.layers) == 0

    @property
    def least_per_microbatch_s(self) -> float:
        """`per_microbatch_s` without copies: no more than that, and less work."""
        return self.evaluator.bare_s(self.layers) / self.evaluator.shape.microbatches

    def order(self) -> tuple[int, float, int, int]:
        """Sort key, best first: what fits, then what is fast, then what needs fewer ranks and microbatches."""
        shape = self.evaluator.shape
        return (
            self.evaluator.excess_bytes(self.layers),
            self.per_microbatch_s,
            shape.ranks,
            shape.microbatches,
        )

    @staticmethod
    def first(candidates: Iterable[Candidate]) -> Candidate | None:
        """The first by `order`. Those that are slower than one that fits are predicted without copies and memory."""
        best: Candidate | None = None
        for each in sorted(candidates, key=lambda each: each.least_per_microbatch_s):
            if best is not None and each.least_per_microbatch_s > best.per_microbatch_s and best.fits:
                break
            if best is None or each.order() < best.order():
                best = each
        return best

    def as_alternative(self, best: Candidate, partition: str | tuple[int, ...]) -> Alternative:
        """The record of this cut, with the reason why the search for `partition` chose `best` instead."""
        shape = self.evaluator.shape
        return Alternative(
            name=self.name,
            schedule=shape.name,
            ranks=shape.ranks,
            microbatches=shape.microbatches,
            layers=self.layers,
            predicted_step_s=self.prediction.step_s,
            why_not=self._why_not(best, partition),
        )

    def _why_not(self, best: Candidate, partition: str | tuple[int, ...]) -> str:
        lacking = max(self.prediction.excess_bytes)
        if lacking:
            return f"rank {self.prediction.excess_bytes.index(lacking)} lacks {lacking:,} bytes of memory"
        if (self.evaluator, self.layers) == (best.evaluator, best.layers):
            return ""
        ratio = self.per_microbatch_s / best.per_microbatch_s
        unit = "" if self.evaluator.shape.microbatches == best.evaluator.shape.microbatches else " per sample"
        if abs(ratio - 1) < _ROUNDED:
            return f"as fast{unit}"
        if ratio > 1:
            return f"{ratio - 1:.1%} slower{unit}"
        # The request excludes this cut: it was simulated only for comparison.
        wanted = repr(partition) if isinstance(partition, str) else str(list(partition))
        return f"{1 - ratio:.1%} faster{unit}, but partition = {wanted} is asked for"
