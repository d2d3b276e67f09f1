"""Effects of a rehearsal on a job's nodes or on one of its ranks, as the event log records them. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from orchestrator.events.level import Level
from planner.wording import counted


@dataclass(frozen=True, kw_only=True)
class NodeLife:
    """A node's life, from when the cluster had it until it was killed; seconds since the Unix epoch."""

    name: str
    """Name in the trace."""
    node: str
    """Node id of the cluster."""
    up_s: float
    down_s: float | None = None
    """None if it outlived the rehearsal."""
    noticed_s: float | None = None
    """When notice of its end came; None if there was no notice."""


@dataclass(frozen=True, kw_only=True)
class CopiesSaved:
    """Cost of the whole trace for a job with `copies` copies of each layer."""

    copies: int
    losses: int
    """Instants at which nodes of the job go."""
    last_holders: int
    """Losses that take the last node that holds some layer."""
    steps_lost: int
    """Committed steps that these take back, to the newest checkpoint each time."""


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """A trace was replayed against the job; written once, after the replay. Seconds since the Unix epoch."""

    trace: str
    """Source of the trace, in words."""
    speedup: float
    """Seconds of the trace per second."""
    grace_s: float | None
    """Seconds of the trace between notice and end of a node; None if no notice is given."""
    began_s: float
    """Time 0 of the trace; the job had committed steps by then."""
    ended_s: float
    """The end of the trace, or of the job, or when someone stopped it."""
    lives: tuple[NodeLife, ...]
    """All nodes that could host ranks."""
    copies: tuple[CopiesSaved, ...] = ()
    """Cost of this trace by number of layer copies; empty if unknown."""

    level: ClassVar[Level] = "detail"

    @property
    def sentence(self) -> str:
        return f"{self.trace} was replayed against the job, on {counted(len(self.lives), 'node')}"


@dataclass(frozen=True, kw_only=True)
class DisturbedSteps:
    """A run of steps that were disturbed, the first and the last of them perhaps in part."""

    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class Disturbed:
    """A rank was slowed down on purpose, again and again; written once, after the job's end."""

    by: str
    """Cause of the slowdown, in words."""
    rank: int
    """Its number."""
    visits: tuple[DisturbedSteps, ...]
    """In order of steps; those that the job's end left out are missing."""
    others: float | None = None
    """Share of the machine's processors that other work took meanwhile, in [0, 1]; None: it was not watched."""
    out_of_time: bool = False
    """Whether the job was stopped before its last step, as the time for it was over."""

    level: ClassVar[Level] = "detail"

    @property
    def sentence(self) -> str:
        return (
            f"rank {self.rank} was slowed down on purpose, {counted(len(self.visits), 'time')}, by {self.by}"
        )
