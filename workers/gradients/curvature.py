"""Samples how fast a job's gradient changes, for the planner (DynPipe, section IV-B).

Keeps copies of one step and compares the next with them. Knows no pipeline, and does not affect training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workers.layers.backward import gradient_of
from workers.protocol.reports import CurvatureReport
from workers.reproducibility.canonical import canonical

Place = tuple[int, str]
"""Layer and parameter."""


@dataclass(eq=False)
class CurvatureProbe:
    """One rank's part of the samples.

    Args:
        every: each step whose number is a multiple of this is kept for the next step.
        parameters: the rank's parameters, each tied one once.
        weights: their values as updates change them: a module may hold them in 16 bits.
    """

    every: int
    rank: int
    parameters: Mapping[Place, Tensor]
    weights: Mapping[Place, Tensor]
    report: Callable[[CurvatureReport], None]
    _kept: dict[Place, tuple[Tensor, Tensor]] | None = field(default=None, init=False)
    """Mean gradient and weight."""

    @torch.no_grad()
    def observe(self, step: int, shares: float, *, may_freeze: bool) -> None:
        """Sample `step` (1 is the job's first) before its update: the summed gradients, and the weights at
        which they were taken. Not called for a skipped step: the kept copies wait for the next one.

        Args:
            shares: the divisor from a summed gradient to the mean.
            may_freeze: whether any gradient, on any rank, may be missing. Then the sample is useless, and the
                kept copies are dropped.
        """
        kept, self._kept = self._kept, None
        if may_freeze:
            return
        if kept is not None:
            self.report(self._compared(step, shares, kept))
        if step % self.every == 0:
            self._kept = {
                place: (gradient_of(parameter) / shares, self.weights[place].clone())
                for place, parameter in self.parameters.items()
            }

    def _compared(
        self, step: int, shares: float, kept: dict[Place, tuple[Tensor, Tensor]]
    ) -> CurvatureReport:
        gradient_change = weight_change = gradient = 0.0
        for place, parameter in self.parameters.items():
            gradient_before, weight_before = kept.pop(place)
            now = gradient_of(parameter)
            gradient_change += _square(gradient_before.sub_(now, alpha=1.0 / shares))
            weight_change += _square(weight_before.sub_(self.weights[place]))
            gradient += _square(now)
        return CurvatureReport(
            step=step,
            rank=self.rank,
            gradient_change_sq=gradient_change,
            weight_change_sq=weight_change,
            gradient_sq=gradient / shares**2,
        )


def _square(tensor: Tensor) -> float:
    """The float64 squared norm."""
    norm = float(torch.linalg.vector_norm(canonical(tensor), dtype=torch.float64))
    return norm * norm
