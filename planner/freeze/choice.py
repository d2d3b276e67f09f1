"""Choice of the way of freezing that comes to a given accuracy soonest, by what is predicted of each (eq. 13).

Weighed are the freeze program's ratios, nothing frozen among them, and a prefix of each number of layers. A hybrid
spends the program's times on what its metric calls stable, which again makes ratios of layers: the program had them to
choose from, and took those with the least predicted time. So no hybrid is predicted to be better, and none is weighed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from planner.freeze.decision import FreezeQuestion
from planner.freeze.fractional import expected_progress, progress_shares
from planner.freeze.time_to_accuracy import time_to_accuracy_ratio
from planner.freezing import Ratios
from planner.simulation.predict import predict

GAIN = 0.03
"""Share of the time to accuracy that another way must save for the job to change to it."""


@dataclass(frozen=True, kw_only=True)
class FreezeOption:
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


def freeze_options(
    question: FreezeQuestion, ratios: Ratios, step_s: Callable[[int], float], *, least: float
) -> Iterator[FreezeOption]:
    """The freeze program's ratios, and the prefixes that leave enough of a step's progress.

    Args:
        question: of the program, with the layers' energies, what is confirmed of its savings, and a profile.
        ratios: the program's.
        step_s: returns the predicted step with a prefix of so many layers, 0 too, as the layers would lie then: a job
            that has packed a prefix would lay itself out anew without it.
        least: share of a step's progress that a prefix leaves.
    """
    plan, schedule, profile, adaptive = question.plan, question.schedule, question.profile, question.adaptive
    assert profile is not None
    shares = progress_shares(question.energies, plan, profile, adaptive=adaptive)
    unfrozen_s = predict(profile, plan, schedule).step_s
    progress = expected_progress(ratios, shares, adaptive=adaptive)
    saved = 1.0 - predict(profile, plan, schedule, ratios).step_s / unfrozen_s
    kappa = 1.0 - question.confirmed * saved
    yield FreezeOption(prefix=0, kappa=kappa * step_s(0) / unfrozen_s, progress=progress)
    for prefix in range(1, len(shares)):
        left = 1.0 - sum(shares[:prefix])
        if left < least:
            return
        yield FreezeOption(prefix=prefix, kappa=step_s(prefix) / unfrozen_s, progress=left)


def better(found: Sequence[FreezeOption], now: int) -> FreezeOption | None:
    """The option that is worth a change; None: none saves `GAIN`.

    Args:
        now: the prefix that the job has; 0: it follows the program's ratios.
    """
    best = min(found, key=lambda each: each.time)
    (present,) = [each for each in found if each.prefix == now] or [None]
    if present is not None and best.time > (1.0 - GAIN) * present.time:
        return None
    return None if best.prefix == now else best
