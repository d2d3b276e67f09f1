"""When a rank counts as hung: it does not answer, or computes one action far longer than whole steps take.

Decides only: times and clocks come in as arguments.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from orchestrator.events.types import Event, Formed
from orchestrator.quantities import seconds
from workers.protocol import StepReport, Working

KEPT_STEPS = 20
"""How many of the newest steps give the usual time of a step."""
MANY = 10.0
"""An action that takes this many times as long as a usual step has hung."""
TELL_AT = 0.5
"""The share of its limit at which a slow action is reported."""

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Pace:
    """Step times, as the log has them."""

    step_s: tuple[float, ...] = ()
    """Of the newest steps."""
    generation: int = 0
    """The newest."""
    steady: bool = False
    """Whether the newest generation has committed a step: the first one loads kernels and compiles."""

    def after(self, event: Event) -> Pace:
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
    """What an action's time means."""

    FINE = "fine"
    SLOW = "slow"
    """Warn about it."""
    HUNG = "hung"
    """Kill the rank."""


def judge(
    working: Working | None, pace: Pace, *, hang_timeout_s: float, timeout_s: float
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
    computes = f"has computed {working.action} for {seconds(working.for_s)}{compared}"
    setting = "elastic.hang_timeout_s" if pace.steady else "cluster.timeout_s for a first step"
    if working.for_s < limit_s:
        return Verdict.SLOW, f"{computes}: it is killed after {seconds(limit_s)} ({setting})"
    return Verdict.HUNG, f"{computes}, and was killed ({setting})"


async def within(
    answer: Awaitable[Answer], limit_s: float, every_s: float, clock: Callable[[], float] = time.monotonic
) -> Answer:
    """Return the result of `answer`. If this process itself was suspended, the limit starts again.

    Args:
        every_s: between two looks at the clock; twice that shows that this process was suspended.

    Raises:
        TimeoutError: there was no answer within `limit_s`.
    """
    future = asyncio.ensure_future(answer)
    began_s = looked_s = clock()
    try:
        while not (await asyncio.wait({future}, timeout=every_s))[0]:
            now_s = clock()
            if now_s - looked_s > 2 * every_s:
                began_s = now_s
            looked_s = now_s
            if now_s - began_s >= limit_s:
                raise TimeoutError
        return future.result()
    finally:
        future.cancel()
