"""Choice of the way of freezing that comes to a given accuracy soonest, by what is predicted of each (eq. 13).

Weighed are the freeze program's ratios and a prefix of each number of layers. A hybrid has the program's times, and
what it spends them on is not known before it has looked at the weights for a while, so none is weighed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from planner.freeze.decision import FreezeDecision, FreezeQuestion
from planner.freeze.fractional import progress_shares
from planner.freeze.time_to_accuracy import time_to_accuracy_ratio
from planner.profile import Profile
from planner.simulation.predict import predict

GAIN = 0.03
"""Share of the time to accuracy that another way must save for the job to change to it."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A way of freezing, and what is predicted of it."""

    prefix: int
    """Layers frozen as a whole, from the input up; 0: the freeze program's ratios."""
    kappa: float
    """A step over one that freezes nothing (eq. 12)."""
    progress: float
    """Share of a step's progress that is left."""

    @property
    def time(self) -> float:
        """Time to a given accuracy over that without freezing."""
        return time_to_accuracy_ratio(self.kappa, self.progress)


def candidates(
    question: FreezeQuestion, decision: FreezeDecision, frozen_by: Callable[[int], Profile]
) -> Iterator[Candidate]:
    """The ways to freeze that leave `question.least_update` of a step's progress, with the layers where they are.

    Args:
        question: with a profile, and the layers' energies.
        decision: the answer to it.
        frozen_by: returns the profile of a prefix of so many layers.
    """
    assert question.profile is not None
    progress = 1.0 if decision.progress is None else decision.progress
    yield Candidate(prefix=0, kappa=decision.kappa, progress=progress)
    plan, schedule = question.plan, question.schedule
    shares = progress_shares(question.energies, plan, question.profile, adaptive=question.adaptive)
    unfrozen_s = predict(frozen_by(0), plan, schedule).step_s
    for prefix in range(1, len(shares)):
        left = 1.0 - sum(shares[:prefix])
        if left < question.least_update:
            return
        step_s = predict(frozen_by(prefix), plan, schedule).step_s
        yield Candidate(prefix=prefix, kappa=step_s / unfrozen_s, progress=left)


def better(found: Sequence[Candidate], now: int) -> Candidate | None:
    """The candidate that is worth a change; None: none saves `GAIN`.

    Args:
        now: the prefix that the job has; 0: it follows the program's ratios.
    """
    best = min(found, key=lambda each: each.time)
    (present,) = [each for each in found if each.prefix == now] or [None]
    if present is not None and best.time > (1.0 - GAIN) * present.time:
        return None
    return None if best.prefix == now else best
