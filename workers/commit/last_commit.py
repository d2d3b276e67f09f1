"""Where a rank stands: the newest commit that it has, and what it knows of that. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from workers.commit.unfinished import Unfinished
from workers.loss_scale import LossScale
from workers.metrics.goals import PastValidation


@dataclass
class LastCommit:
    """The newest commit of one rank, over all generations."""

    step: int = 0
    vector: tuple[bytes, ...] | None = None
    """All ranks' records of it, if this rank took part in it or was brought them."""
    left: Unfinished | None = None
    """Progress on what the commit requests, if this rank took part in it."""
    loss_scale: LossScale | None = None
    """Loss scale of the step after it, where the precision needs one and this rank knows it."""
    validations: tuple[PastValidation, ...] = ()
    """Validations of the job that this rank knows of, in order."""

    def move_to(self, step: int, loss_scale: LossScale | None) -> None:
        """All ranks move to `step`, of whose commit this one knows no more than the loss scale after it."""
        self.step, self.loss_scale = step, loss_scale
        self.vector = self.left = None
