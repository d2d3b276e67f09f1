"""Number of updates that a job needs: DynPipe's Theorem 1 (eq. 2) and its consequence (eq. 3). Knows no time.

The theorem assumes the staleness of an asynchronous pipeline with weight stashing, S - i updates on stage i. A
synchronous schedule has no staleness: its number of updates does not depend on the stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from planner.wording import counted


class ConvergenceError(ValueError):
    """Numbers outside the assumptions of Theorem 1; the message names the violated bound."""


@dataclass(frozen=True, kw_only=True)
class Convergence:
    """The constants of Theorem 1 for one job.

    Raises:
        ConvergenceError: a number is not positive, or eta L > 1.
    """

    loss: float
    """f(w^(0)), the initial loss above the least one (which eq. 3 takes as 0)."""
    learning_rate: float
    """eta."""
    smoothness: float
    """L, see `smoothness`."""
    second_moment: float
    """xi^2, see `second_moment`."""
    target: float
    """epsilon: the mean squared gradient norm that counts as converged."""

    def __post_init__(self) -> None:
        for name in ("loss", "learning_rate", "smoothness", "second_moment", "target"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConvergenceError(f"{name} = {value}: must be a finite number above 0")
        if self.learning_rate * self.smoothness > 1:
            raise ConvergenceError(
                f"the theorem needs eta L <= 1, and eta = {self.learning_rate:.3g} with L = {self.smoothness:.3g} give"
                f" {self.learning_rate * self.smoothness:.3g}: lower the learning rate to"
                f" {1 / self.smoothness:.3g} at most"
            )

    def staleness_error(self, stages: int) -> float:
        """2 eta^2 S^3 L^2 xi^2 of eq. 2: the error that no number of updates removes."""
        return 2 * self.learning_rate**2 * stages**3 * self.smoothness**2 * self.second_moment

    def error(self, updates: int, stages: int, *, variance: float = 0.0, batch: int = 1) -> float:
        """The right side of eq. 2, with f(w^(T)) = 0.

        Args:
            variance: sigma^2 of one sample's gradient.
            batch: B, samples of one update.
        """
        fallen = 2 * self.loss / (updates * self.learning_rate)
        return fallen + self.staleness_error(stages) + 2 * variance / batch

    def updates(self, stages: int, *, synchronous: bool) -> int:
        """T(S): the least number of updates that reaches the target (eq. 3).

        Raises:
            ConvergenceError: no number does, as staleness alone keeps the error at the target or above.
        """
        stale = 0.0 if synchronous else self.staleness_error(stages)
        if self.target <= stale:
            most = math.ceil((self.target / self.staleness_error(1)) ** (1 / 3)) - 1
            fewer = f"at most {counted(most, 'stage')}, " if most else ""
            raise ConvergenceError(
                f"a target error of {self.target:.3g} is out of reach with {stages} asynchronous stages: staleness"
                f" alone keeps 2 eta^2 S^3 L^2 xi^2 = {stale:.3g}. Use {fewer}a lower learning rate, a synchronous"
                " schedule, or a higher target"
            )
        return math.ceil(2 * self.loss / (self.learning_rate * (self.target - stale)))


def smoothness(gradient_changes: Sequence[float], weight_changes: Sequence[float]) -> float:
    """L from the running job: the greatest ratio of ||grad(t) - grad(t-1)|| to ||w(t) - w(t-1)||.

    It takes the greatest ratio because Assumption 1 bounds every pair. The gradients are stochastic and their noise
    adds to the change, so the estimate tends to be too high.

    Args:
        gradient_changes: norms, one per sampled update.
        weight_changes: norms of the same updates; zeros are ignored.

    Raises:
        ConvergenceError: no sample in which the weights changed.
    """
    ratios = [
        gradient / weight for gradient, weight in zip(gradient_changes, weight_changes, strict=True) if weight
    ]
    if not ratios:
        raise ConvergenceError(
            "smoothness needs a sampled update that changed the weights: sample more of them"
        )
    return max(ratios)


def second_moment(gradient_norms: Sequence[float]) -> float:
    """xi^2 from the running job: the mean squared norm of its stochastic gradients (Assumption 2).

    Raises:
        ConvergenceError: no sample.
    """
    if not gradient_norms:
        raise ConvergenceError("the second moment needs a sampled gradient: sample some")
    return fmean(norm * norm for norm in gradient_norms)


@dataclass(frozen=True, kw_only=True)
class CurvatureSample:
    """Two gradients of the running job, one update apart: norms over the whole model."""

    gradient_change: float
    weight_change: float
    gradient: float
    """Norm of the later gradient."""


@dataclass(frozen=True, kw_only=True)
class Estimates:
    """Estimates of Theorem 1's constants from the running job."""

    smoothness: float
    """L."""
    second_moment: float
    """xi^2."""
    samples: int


def estimate(samples: Sequence[CurvatureSample]) -> Estimates:
    """L and xi^2 from samples of the running job (section IV-B).

    Raises:
        ConvergenceError: no sample in which the weights changed.
    """
    return Estimates(
        smoothness=smoothness(
            [sample.gradient_change for sample in samples], [sample.weight_change for sample in samples]
        ),
        second_moment=second_moment([sample.gradient for sample in samples]),
        samples=len(samples),
    )
