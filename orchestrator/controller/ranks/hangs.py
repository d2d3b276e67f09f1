"""When a rank that answers counts as hung: it computes one action far longer than whole steps take.

Decides only: times come in as arguments. A rank that does not answer is in `silence.py`.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from enum import StrEnum

from orchestrator.events.types import Event, Formed
from orchestrator.quantities import seconds
from workers.protocol.reports import StepReport, Working

KEPT_STEPS = 20
"""Number of newest steps that give the usual step time."""
MANY = 10.0
"""An action that takes this many times as long as a usual step has hung."""
TIMES_LIMIT = 4.0
"""A rank may take this many times its limit, whatever explains it: one that runs for ever without an answer, or only
seems to wait for a processor, is found then."""
TELL_AT = 0.5
"""The share of its limit at which a slow action is reported."""


@dataclass(frozen=True)
class StepPace:
    """Step times, as the log has them."""

    step_s: tuple[float, ...] = ()
    """Times of the newest steps."""
    generation: int = 0
    """The newest."""
    steady: bool = False
    """Whether the newest generation has committed a step: the first one loads kernels and compiles."""

    def after(self, event: Event) -> StepPace:
        """Return the pace after `event`."""
        match event:
            case Formed(generation=generation):
                return replace(self, generation=generation.number, steady=False)
            case StepReport(step_s=step_s, generation=generation):
                steady = self.steady or generation == self.generation
                return replace(self, step_s=(*self.step_s, step_s)[-KEPT_STEPS:], steady=steady)
            case _:
                return self

    @property
    def usual_s(self) -> float | None:
        """The median step time; None: no step is known."""
        return statistics.median(self.step_s) if self.step_s else None


class Verdict(StrEnum):
    """Verdict on the time of an action."""

    FINE = "fine"
    SLOW = "slow"
    """Warn about it."""
    HUNG = "hung"
    """Kill the rank."""


def judge(
    working: Working | None, pace: StepPace, *, hang_timeout_s: float, timeout_s: float
) -> tuple[Verdict, str]:
    """Decide whether a rank that answers has hung, and say why.

    Args:
        working: what it computes; None: nothing.
        timeout_s: what a generation's first step may take, whatever later steps take.
    """
    if working is None:
        return Verdict.FINE, ""
    usual_s = pace.usual_s
    limit_s = max(hang_timeout_s, MANY * (usual_s or 0.0), 0.0 if pace.steady else timeout_s)
    if working.for_s < TELL_AT * limit_s:
        return Verdict.FINE, ""
    compared = f", where a step takes {seconds(usual_s)}" if usual_s is not None else ""
    starved = (
        f"; it waited for a processor for {seconds(working.starved_s)} of it" if working.starved_s else ""
    )
    computes = f"has computed {working.action} for {seconds(working.for_s)}{compared}{starved}"
    setting = "elastic.hang_timeout_s" if pace.steady else "cluster.timeout_s for a first step"
    # A rank that gets no processor makes no progress, and has not hung.
    if working.for_s - working.starved_s >= limit_s or working.for_s >= TIMES_LIMIT * limit_s:
        return Verdict.HUNG, f"{computes}, and was killed ({setting})"
    return Verdict.SLOW, f"{computes}: it is killed after {seconds(limit_s)} with a processor ({setting})"
