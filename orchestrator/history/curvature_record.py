"""How a job's gradient changed with its weights: the ranks' parts put together, one sample per step.

Reads event values only; part of a `RunRecord`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from planner.search.convergence import ConvergenceError, CurvatureSample, Estimates, estimate
from workers.protocol import CurvatureReport


@dataclass
class CurvatureRecord:
    """The samples of a run."""

    samples: dict[int, CurvatureSample] = field(default_factory=dict)
    """By step; those of which all ranks were heard."""
    _parts: dict[int, dict[int, CurvatureReport]] = field(default_factory=dict)
    """Step -> rank, of the others."""

    def take(self, report: CurvatureReport, ranks: int) -> None:
        """Fold one more part in.

        Args:
            ranks: of one pipeline: so many parts make a sample.
        """
        parts = self._parts.setdefault(report.step, {})
        parts[report.rank] = report
        if len(parts) == ranks:
            of_ranks = [self._parts[report.step][rank] for rank in sorted(parts)]
            del self._parts[report.step]
            self.samples[report.step] = CurvatureSample(
                gradient_change=math.sqrt(sum(part.gradient_change_sq for part in of_ranks)),
                weight_change=math.sqrt(sum(part.weight_change_sq for part in of_ranks)),
                gradient=math.sqrt(sum(part.gradient_sq for part in of_ranks)),
            )

    def void_after(self, step: int) -> None:
        """Forget what came after `step`: it is run again."""
        self.samples = {number: sample for number, sample in self.samples.items() if number <= step}
        self._parts = {number: parts for number, parts in self._parts.items() if number <= step}

    def estimates(self) -> Estimates | None:
        """L and xi^2; None if there is no sample that tells of both."""
        try:
            return estimate(list(self.samples.values()))
        except ConvergenceError:
            return None
