"""The events of the state machine in `machine.py`: all that can happen to a job.

Frozen values. If a stimulus answers an effect of an attempt to form a generation, `round` says which attempt,
so that late answers can be recognized.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.events.types import Event, FreezeChanged, FreezeSolved, Scaled
from orchestrator.lifecycle.migration import RequestedMove
from planner.ir import Schedule
from planner.plan import Plan
from planner.shards import Piece
from workers.protocol.errors import DamagedCheckpoint, MemoryShortage
from workers.protocol.orders import Request
from workers.protocol.reports import Outcome, Parted, RankPosition, Report


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
    zone: str = ""
    """Zone of the node; empty if unknown."""
    machine: str = ""
    """Hardware and library, as in `RankStarted`."""


@dataclass(frozen=True)
class Reclaimed:
    """A rank that an earlier controller started answers this one."""

    rank: int
    node: str
    host: str
    round: int = 0


@dataclass(frozen=True)
class Positioned:
    """A rank has left its generation and reports its position."""

    position: RankPosition
    round: int = 0


@dataclass(frozen=True)
class CommitFinished:
    """A rank stands at the common step."""

    rank: int
    round: int = 0


@dataclass(frozen=True)
class PlanReady:
    """There is a plan for the ranks that continue."""

    plan: Plan
    schedule: Schedule
    round: int = 0


@dataclass(frozen=True)
class Unplannable:
    """No plan fits the ranks that are left."""

    reason: str
    round: int = 0


@dataclass(frozen=True)
class RankLoaded:
    """A rank holds its layers, or reports a damaged checkpoint."""

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
class TrainingEnded:
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
    """It lost its connection to another rank: the cause lies there."""
    user_error: bool = False
    details: str = ""
    dead: bool = False
    """There is no such process any more, or none that answers; it was killed to make sure."""
    shortage: MemoryShortage | None = None
    """It ran out of memory."""
    round: int = 0
    silent_s: float = 0.0
    """Time that it had stood still when it was killed for that: since its last answer, or in one action."""


@dataclass(frozen=True)
class Solved:
    """The planner knows what to freeze."""

    solution: FreezeSolved


@dataclass(frozen=True)
class FreezeAsked:
    """Someone changes the freeze settings."""

    change: FreezeChanged
    solution: FreezeSolved | None = None
    """Where the ratios of its plan come from."""


@dataclass(frozen=True)
class Noted:
    """An event that changes nothing for the lifecycle and belongs in the log."""

    event: Event


@dataclass(frozen=True)
class SaveOrStop:
    """A checkpoint or a stop is requested."""

    request: Request


@dataclass(frozen=True)
class PauseAsked:
    """A pause is requested: the job is to release its ranks and wait."""


@dataclass(frozen=True)
class ResumeAsked:
    """A paused job is to go on."""


@dataclass(frozen=True)
class Migrate:
    """The ranks are to follow another plan."""

    move: RequestedMove


@dataclass(frozen=True)
class ScaleRequested:
    """Another number of ranks is requested."""

    event: Scaled
    """With the id of the command."""
    resizes: bool = True
    """Whether a number of ranks was requested; False: only the spares change."""

    @property
    def id(self) -> str:
        """Id of the command."""
        return self.event.id


@dataclass(frozen=True)
class Aborted:
    """The job is to end at once, without a checkpoint."""


@dataclass(frozen=True)
class Room:
    """The cluster has room for `ranks` more ranks."""

    ranks: int


@dataclass(frozen=True)
class Weighed:
    """Whether the idle ranks, or the layers frozen by now, are worth a regroup."""

    pays: bool
    reason: str
    round: int = 0
    prefix: int = 0
    """The first step of the frozen prefix that was counted on."""


@dataclass(frozen=True)
class PlannedAhead:
    """The plan of a coming generation, or why there is none."""

    number: int
    """Number of the change."""
    plan: Plan | None = None
    schedule: Schedule | None = None
    copying: Plan | None = None
    """The plan in force, with copies of what each rank will own; None: they do not fit."""
    building: Mapping[int, tuple[Piece, ...]] = field(default_factory=dict)
    """Rank -> layers, or shards, that it builds beside training; see `planner.arrivals.built_ahead`."""
    why: str = ""
    """Why there is no plan, or no copies, or nothing to build although ranks lack layers."""


@dataclass(frozen=True)
class Going:
    """A preemption or drain notice arrived for ranks."""

    ranks: frozenset[int]
    source: str
    """Source of the notice, as in `events.Noticed`."""
    left_s: float | None = None
    node: str = ""
    host: str = ""
    id: str = ""
    """Id of the command that requested it; empty: none did."""


@dataclass(frozen=True)
class WaitOver:
    """The time of `Wait` has passed."""

    pause: int


@dataclass(frozen=True)
class RanksOverdue:
    """The time of `AwaitRanks` has passed."""

    id: str


@dataclass(frozen=True)
class CopiesOverdue:
    """The time of `AwaitCopies` has passed."""

    ranks: frozenset[int] = frozenset()
    """Draining ranks that must hand over now."""
    change: int = 0
    """The number of the change that must not wait any longer."""


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
    | CommitFinished
    | PlanReady
    | Unplannable
    | RankLoaded
    | StoreUp
    | Joined
    | Reported
    | TrainingEnded
    | Departed
    | RankLost
    | Solved
    | FreezeAsked
    | Noted
    | SaveOrStop
    | PauseAsked
    | ResumeAsked
    | Migrate
    | ScaleRequested
    | Aborted
    | Room
    | Weighed
    | PlannedAhead
    | Going
    | WaitOver
    | RanksOverdue
    | CopiesOverdue
    | Released
)

Answer = (
    Reclaimed
    | Positioned
    | CommitFinished
    | PlanReady
    | Unplannable
    | RankLoaded
    | StoreUp
    | Joined
    | TrainingEnded
    | Departed
    | Weighed
)
"""Stimuli that belong to one attempt."""
