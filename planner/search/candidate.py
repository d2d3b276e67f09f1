"""One cut of one shape as the search weighs it."""

from __future__ import annotations

from dataclasses import dataclass

from planner.partition.stage_costs import Ranges
from planner.search.considered import Considered
from planner.search.evaluate import Judge
from planner.simulation.predict import Prediction


@dataclass(frozen=True)
class Candidate:
    """A cut of a shape."""

    judge: Judge
    name: str
    layers: Ranges

    @property
    def prediction(self) -> Prediction:
        return self.judge.predict(self.layers)

    @property
    def per_microbatch_s(self) -> float:
        """What is compared between shapes, as each microbatch holds the same number of samples."""
        return self.prediction.step_s / self.judge.shape.microbatches

    def order(self) -> tuple[int, float, int, int]:
        """Sorts the best first: what fits, then what is fast, then what takes less."""
        shape = self.judge.shape
        return sum(self.prediction.excess_bytes), self.per_microbatch_s, shape.ranks, shape.microbatches

    def told(self, best: Candidate) -> Considered:
        """For people: with the reason why `best` was taken instead."""
        shape = self.judge.shape
        return Considered(
            name=self.name,
            schedule=shape.name,
            ranks=shape.ranks,
            microbatches=shape.microbatches,
            layers=self.layers,
            predicted_step_s=self.prediction.step_s,
            why_not=self._why_not(best),
        )

    def _why_not(self, best: Candidate) -> str:
        lacking = max(self.prediction.excess_bytes)
        if lacking:
            return f"rank {self.prediction.excess_bytes.index(lacking)} lacks {lacking:,} bytes of memory"
        if (self.judge, self.layers) == (best.judge, best.layers):
            return ""
        ratio = self.per_microbatch_s / best.per_microbatch_s
        unit = "" if self.judge.shape.microbatches == best.judge.shape.microbatches else " per sample"
        return f"{ratio - 1:.1%} slower{unit}" if ratio > 1 else f"no faster{unit}"
