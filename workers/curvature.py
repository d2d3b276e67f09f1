"""Samples of how fast a job's gradient changes, for the planner's estimate of its smoothness (DynPipe, section IV-B).

Keeps copies of one step and holds the next against them. Knows no pipeline, and changes nothing that trains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from workers.protocol import CurvatureReport
from workers.reproducibility.canonical import canonical

Place = tuple[int, str]
"""Layer and parameter."""


class CurvatureProbe:
    """One rank's part of the samples.

    Args:
        every: a step whose number is a multiple of it is kept for the one after.
        microbatches: R * M, by which a summed gradient becomes the mean one.
        parameters: of the rank, a tied one once.
    """

    def __init__(
        self,
        every: int,
        rank: int,
        microbatches: int,
        parameters: Mapping[Place, Tensor],
        report: Callable[[CurvatureReport], None],
    ) -> None:
        self._every = every
        self._rank = rank
        self._microbatches = microbatches
        self._parameters = parameters
        self._report = report
        self._kept: dict[Place, tuple[Tensor, Tensor]] | None = None

    @torch.no_grad()
    def observe(self, step: int, *, may_freeze: bool) -> None:
        """Look at what `step` (1 is the job's first) found, before it is applied: the summed gradients, and the
        weights at which they were taken. Not called for a step that is skipped: what is kept waits for the next.

        Args:
            may_freeze: whether anything, on any rank, may be missing from the gradients. Then they say nothing, and
                what is kept is given up.
        """
        kept, self._kept = self._kept, None
        if may_freeze:
            return
        if kept is not None:
            self._report(self._compared(step, kept))
        if step % self._every == 0:
            self._kept = {
                place: (self._gradient(parameter).clone(), parameter.clone())
                for place, parameter in self._parameters.items()
            }

    def _compared(self, step: int, kept: dict[Place, tuple[Tensor, Tensor]]) -> CurvatureReport:
        gradient_change = weight_change = gradient = 0.0
        for place, parameter in self._parameters.items():
            gradient_before, weight_before = kept.pop(place)
            now = self._gradient(parameter)
            gradient_change += _square(gradient_before.sub_(now))
            weight_change += _square(weight_before.sub_(parameter))
            gradient += _square(now)
        mean = float(self._microbatches) ** 2
        return CurvatureReport(
            step=step,
            rank=self._rank,
            gradient_change_sq=gradient_change / mean,
            weight_change_sq=weight_change,
            gradient_sq=gradient / mean,
        )

    @staticmethod
    def _gradient(parameter: Tensor) -> Tensor:
        """Zero for a parameter that the loss does not depend on."""
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _square(tensor: Tensor) -> float:
    """The float64 squared norm."""
    norm = float(torch.linalg.vector_norm(canonical(tensor), dtype=torch.float64))
    return norm * norm
