"""What can happen to a job: the second of the three alphabets of `machine.py`.

Frozen values. Where one answers a command of one attempt to form a generation, `round` says which: what comes too late
is told from what counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.events.types import Event, FreezeSolved
from orchestrator.lifecycle.migration import Move
from planner.ir import Schedule
from planner.plan import Plan
from workers.protocol import DamagedCheckpoint, Outcome, Parted, Position, Report, Request


@dataclass(frozen=True)
class Start:
    """The controller is ready to go."""


@dataclass(frozen=True)
class Placed:
    """Every rank's resources are reserved."""


@dataclass(frozen=True)
class Unplaceable:
    """The cluster does not have what the job needs."""

    reason: str


@dataclass(frozen=True)
class Ready:
    """A rank is up and has opened model and data."""

    rank: int
    node: str
    host: str
    pid: int


@dataclass(frozen=True)
class Reclaimed:
    """A rank that an earlier controller started answers this one."""

    rank: int
    node: str
    host: str
    round: int = 0


@dataclass(frozen=True)
class Positioned:
    """A rank has left its generation and says where it stands."""

    position: Position
    round: int = 0


@dataclass(frozen=True)
class Settled:
    """A rank stands where all do."""

    rank: int
    round: int = 0


@dataclass(frozen=True)
class Planned:
    """There is a plan for those who go on."""

    plan: Plan
    schedule: Schedule
    round: int = 0


@dataclass(frozen=True)
class Unplannable:
    """Nothing fits those who are left."""

    reason: str
    round: int = 0


@dataclass(frozen=True)
class Loaded:
    """A rank holds its layers, or says why the checkpoint will not do."""

    rank: int
    damage: DamagedCheckpoint | None
    round: int = 0


@dataclass(frozen=True)
class StoreUp:
    """The store is up."""

    host: str
    port: int
    round: int = 0


@dataclass(frozen=True)
class Joined:
    """A rank is in the process group."""

    rank: int
    round: int = 0


@dataclass(frozen=True)
class Reported:
    """A rank reported something about training."""

    report: Report


@dataclass(frozen=True)
class Ended:
    """A rank's training ended as planned."""

    outcome: Outcome
    round: int = 0


@dataclass(frozen=True)
class Departed:
    """A rank left its generation at a commit, as it was asked to."""

    parted: Parted
    round: int = 0


@dataclass(frozen=True)
class RankLost:
    """A rank's process died, or a call to it raised."""

    rank: int
    error: str
    cut_off: bool = False
    """It lost another rank: the cause lies there."""
    user_error: bool = False
    details: str = ""
    dead: bool = False
    """There is no such process any more, or none that answers; it was killed to make sure."""
    round: int = 0


@dataclass(frozen=True)
class Solved:
    """The planner knows what to freeze."""

    solution: FreezeSolved


@dataclass(frozen=True)
class Noted:
    """Something beside the job's course that belongs in its log."""

    event: Event


@dataclass(frozen=True)
class Asked:
    """Someone wants a checkpoint or a stop."""

    request: Request


@dataclass(frozen=True)
class PauseAsked:
    """Someone wants the job to give its ranks back and wait."""


@dataclass(frozen=True)
class ResumeAsked:
    """Someone wants a paused job to go on."""


@dataclass(frozen=True)
class Migrate:
    """Someone wants the ranks to follow another plan."""

    move: Move


@dataclass(frozen=True)
class Aborted:
    """Someone wants it over at once, without a checkpoint."""


@dataclass(frozen=True)
class Room:
    """The cluster has room for so many ranks more."""

    ranks: int


@dataclass(frozen=True)
class Weighed:
    """Whether the ranks that stand idle are worth a regroup."""

    pays: bool
    reason: str
    round: int = 0


@dataclass(frozen=True)
class Going:
    """Word came that ranks are to go."""

    ranks: frozenset[int]
    source: str
    """As in `events.Noticed`."""
    left_s: float | None = None
    node: str = ""
    host: str = ""


@dataclass(frozen=True)
class WaitOver:
    """The time of a `Wait` has passed."""

    pause: int


@dataclass(frozen=True)
class Released:
    """Ranks and reservations are gone."""


Stimulus = (
    Start
    | Placed
    | Unplaceable
    | Ready
    | Reclaimed
    | Positioned
    | Settled
    | Planned
    | Unplannable
    | Loaded
    | StoreUp
    | Joined
    | Reported
    | Ended
    | Departed
    | RankLost
    | Solved
    | Noted
    | Asked
    | PauseAsked
    | ResumeAsked
    | Migrate
    | Aborted
    | Room
    | Weighed
    | Going
    | WaitOver
    | Released
)

Answer = (
    Reclaimed
    | Positioned
    | Settled
    | Planned
    | Unplannable
    | Loaded
    | StoreUp
    | Joined
    | Ended
    | Departed
    | Weighed
)
"""Belongs to one attempt."""
