"""Change of a job's gradient with its weights: the ranks' parts combined, one sample per step.

Reads event values only; part of a `JobView`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

from orchestrator.history.columns import Columns
from orchestrator.history.thinning import Grid, thin, up_to
from planner.search.convergence import ConvergenceError, CurvatureSample, Estimates, estimate
from workers.protocol.reports import CurvatureReport

INCOMPLETE = 50
"""Most steps whose parts are kept while some ranks' parts are missing."""


@dataclass
class CurvatureRecord:
    """The samples of a run."""

    samples: Annotated[dict[int, CurvatureSample], Columns(CurvatureSample)] = field(default_factory=dict)
    """By step: the steps that all ranks have reported."""
    parts: dict[int, dict[int, CurvatureReport]] = field(default_factory=dict)
    """Step -> rank -> part, of the other steps."""

    def fold(self, report: CurvatureReport, ranks: int) -> None:
        """Add one more part.

        Args:
            ranks: how many ranks keep different states; as many parts make a sample.
        """
        parts = self.parts.setdefault(report.step, {})
        parts[report.rank] = report
        if len(parts) == ranks:
            of_ranks = [parts[rank] for rank in sorted(parts)]
            del self.parts[report.step]
            self.samples[report.step] = CurvatureSample(
                gradient_change=math.sqrt(sum(part.gradient_change_sq for part in of_ranks)),
                weight_change=math.sqrt(sum(part.weight_change_sq for part in of_ranks)),
                gradient=math.sqrt(sum(part.gradient_sq for part in of_ranks)),
            )
        elif len(self.parts) > INCOMPLETE:
            del self.parts[min(self.parts)]

    def take_back(self, step: int) -> None:
        """Forget the steps after `step`."""
        self.samples, self.parts = up_to(self.samples, step), up_to(self.parts, step)

    def thin(self, grid: Grid) -> None:
        """Keep one sample per bucket of `grid`."""
        self.samples = thin(self.samples, grid)

    def estimates(self) -> Estimates | None:
        """L and xi^2; None if no sample has both."""
        try:
            return estimate(list(self.samples.values()))
        except ConvergenceError:
            return None
