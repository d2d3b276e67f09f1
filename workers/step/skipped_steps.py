"""Counts the newest run of skipped steps and decides when the job ends. Pure.

A step is skipped if its gradient norm is not finite, or none of its samples has a target: it is committed and changes
no weight.
"""

from __future__ import annotations

import math

from workers.commit.commit import CommitDecision
from workers.protocol.loss_scale import LossScale


class SkippedSteps:
    """The newest run of skipped steps.

    Args:
        most: the job ends after this many in a row.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._in_a_row = 0
        self._norm = math.nan
        self._loss = math.nan
        self._targets = True

    @property
    def too_many(self) -> bool:
        return self._in_a_row >= self._most

    def count(self, decision: CommitDecision, loss_scale: LossScale | None = None) -> str | None:
        """Count the step of `decision`.

        Args:
            loss_scale: of the next step, where the precision needs one.

        Returns:
            A warning, if one is due.
        """
        if not decision.skipped:
            self._in_a_row = 0
            return None
        self._in_a_row += 1
        self._norm, self._loss, self._targets = decision.grad_norm, decision.loss, decision.targets
        if self.too_many or self._in_a_row not in (1, 10, self._most // 2):
            return None
        why = (
            f"the gradient norm is {self._norm:g}" if decision.targets else "none of its samples has a target"
        )
        lowered = (
            ""
            if loss_scale is None or not decision.targets
            else f"; the loss scale is {loss_scale.value:g} now"
        )
        skipped = f"{self._in_a_row} steps in a row up to step" if self._in_a_row > 1 else "step"
        return (
            f"{skipped} {decision.step} changed no weight: {why}{lowered}. After"
            f" {self._most} in a row the job ends (optimizer.max_skipped_steps)"
        )

    def explain(self, step: int, loss_scale: LossScale | None = None) -> str:
        """Why the job ends at `step`, and what a user can do about it."""
        if not self._targets:
            return (
                f"{self._in_a_row} steps in a row up to step {step} changed no weight, because none of their samples"
                " has a target: look for rows of data without an answer or a label"
            )
        if loss_scale is not None and math.isfinite(self._loss):
            return (
                f"{self._in_a_row} steps in a row up to step {step} changed no weight, because their gradients"
                f" overflowed float16 at every loss scale down to {2 * loss_scale.value:g} (loss {self._loss:g}): set"
                ' job.precision = "bfloat16", which has the range of float32, or lower optimizer.lr.'
                " optimizer.max_skipped_steps sets how many steps in a row may be skipped"
            )
        return (
            f"{self._in_a_row} steps in a row up to step {step} changed no weight, because their gradient norm was not"
            f" finite (now {self._norm:g}, loss {self._loss:g}): lower optimizer.lr, add optimizer.warmup_steps, or"
            " look for inf and nan in the data. optimizer.max_skipped_steps sets how many steps in a row may be skipped"
        )
