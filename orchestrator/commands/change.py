"""Changes to a job that the simulator can be asked about, as values."""

from __future__ import annotations

from dataclasses import dataclass

from planner.freezing import Budget
from workers.protocol.errors import JobError


class Impossible(JobError):
    """No plan meets the change, with the job's profile."""


KEEP, BEST = "keep", "best"
"""Cuts that need no numbers: today's, and the planner's choice for the changed case."""


@dataclass(frozen=True, kw_only=True)
class WhatIfChange:
    """Changes to a job. None: as it is today."""

    ranks: int | None = None
    """Ranks of one pipeline."""
    pipelines: int | None = None
    """Pipelines that run."""
    schedule: str | None = None
    """A family of schedules."""
    cut: str | tuple[int, ...] = BEST
    """`keep`, `best`, or the layers per stage."""
    r_max: Budget | None = None
    """0: nothing is frozen."""
    least_update: float | None = None
    """With r_max auto."""
    frozen: int | None = None
    """Layers from the input up that are frozen as a whole."""
    slow_rank: int | None = None
    slowdown: float = 1.0
    """Factor on the times of `slow_rank`'s device."""
    source: int | None = None
    target: int | None = None
    """The link between these two ranks, in both directions."""
    bandwidth: float = 1.0
    """Factor on its bytes per second."""
