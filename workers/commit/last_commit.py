"""Where a rank stands: the newest commit that it has, and what it knows of that. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from workers.commit.unfinished import Unfinished
from workers.protocol.carried import Carried
from workers.protocol.goals import PastValidation


@dataclass
class LastCommit:
    """The newest commit of one rank, over all generations."""

    step: int = 0
    vector: tuple[bytes, ...] | None = None
    """All ranks' records of it, if this rank took part in it or was brought them."""
    left: Unfinished | None = None
    """Progress on what the commit requests, if this rank took part in it."""
    carried: Carried | None = None
    """State besides layers that the step after it follows, where this rank knows that."""
    validations: tuple[PastValidation, ...] = ()
    """Validations of the job that this rank knows of, in order."""

    def move_to(self, step: int, carried: Carried | None) -> None:
        """All ranks move to `step`, of whose commit this one knows no more than what the next step follows."""
        self.step, self.carried = step, carried
        self.vector = self.left = None
