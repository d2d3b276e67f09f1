"""Where a job can be, what can happen to it, and what it can ask for: the three alphabets of `lifecycle.py`.

Frozen values, each with only its own payload. No transition is decided here.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.events import Event
from planner.plan import Plan
from workers.protocol import (
    CheckpointRef,
    DamagedCheckpoint,
    Generation,
    Outcome,
    Report,
    Request,
)


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a job was told to do; it does not change while the job lives."""

    job: str
    epoch: int
    """Incarnation of the controller."""
    generation: int
    """Number of the first generation of ranks; those before it were of earlier controllers."""
    plan: Plan
    checkpoints: tuple[CheckpointRef, ...]
    """To start from, newest first; the next is tried if one is damaged. Empty: from initial weights."""
    timeout_s: float
    """How long a collective may wait."""
    grace_s: float = 5.0
    """How long the cause may take to show once a rank has lost another."""


# States


@dataclass(frozen=True)
class Pending:
    """Accepted; nothing was asked of the cluster yet."""


@dataclass(frozen=True)
class Placing:
    """Resources are being reserved, one placement group per rank."""


@dataclass(frozen=True)
class Preparing:
    """Rank processes start and open model and data."""

    waiting: frozenset[int]


@dataclass(frozen=True)
class Loading:
    """Each rank builds its layers and loads them from the first of `checkpoints`."""

    checkpoints: tuple[CheckpointRef, ...]
    waiting: frozenset[int]
    damage: tuple[DamagedCheckpoint, ...]


@dataclass(frozen=True)
class Hosting:
    """Rank 0 opens the store over which the group forms."""

    start: CheckpointRef | None


@dataclass(frozen=True)
class Joining:
    """The ranks form their process group."""

    start: CheckpointRef | None
    waiting: frozenset[int]


@dataclass(frozen=True)
class Training:
    """Steps are committed. The controller only listens."""

    step: int
    waiting: frozenset[int]
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True)
class Stopping:
    """A stop was requested; the ranks end at their next commit."""

    step: int
    waiting: frozenset[int]
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True)
class Failing:
    """A rank lost another one; all were told to leave, and the cause has yet to be heard of."""

    step: int
    waiting: frozenset[int]
    first: RankLost


@dataclass(frozen=True)
class Closing:
    """The end is known; ranks and reservations are being given back."""

    end: Finished | Failed


@dataclass(frozen=True)
class Finished:
    """Done: the last step is committed, or a stop was obeyed."""

    step: int
    stopped: bool
    state_sha256: str | None
    """None: no step was trained in this run."""


@dataclass(frozen=True)
class Failed:
    """Ended as nobody wished."""

    reason: str
    user_error: bool


State = (
    Pending
    | Placing
    | Preparing
    | Loading
    | Hosting
    | Joining
    | Training
    | Stopping
    | Failing
    | Closing
    | Finished
    | Failed
)


# What can happen


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
class Loaded:
    """A rank holds its layers, or says why the checkpoint will not do."""

    rank: int
    damage: DamagedCheckpoint | None


@dataclass(frozen=True)
class StoreUp:
    """Rank 0 hosts the store."""

    host: str
    port: int


@dataclass(frozen=True)
class Joined:
    """A rank is in the process group."""

    rank: int


@dataclass(frozen=True)
class Reported:
    """A rank reported something about training."""

    report: Report


@dataclass(frozen=True)
class Ended:
    """A rank's training ended as planned."""

    outcome: Outcome


@dataclass(frozen=True)
class RankLost:
    """A rank's process died, or a call to it raised."""

    rank: int
    error: str
    cut_off: bool = False
    """It lost another rank: the cause lies there."""
    user_error: bool = False
    details: str = ""


@dataclass(frozen=True)
class Asked:
    """Someone wants a checkpoint or a stop."""

    request: Request


@dataclass(frozen=True)
class Aborted:
    """Someone wants it over at once, without a checkpoint."""


@dataclass(frozen=True)
class GraceOver:
    """`Order.grace_s` has passed since `Wait`."""


@dataclass(frozen=True)
class Released:
    """Ranks and reservations are gone."""


Stimulus = (
    Start
    | Placed
    | Unplaceable
    | Ready
    | Loaded
    | StoreUp
    | Joined
    | Reported
    | Ended
    | RankLost
    | Asked
    | Aborted
    | GraceOver
    | Released
)


# What the shell is told to do


@dataclass(frozen=True)
class Log:
    """Append to the event log."""

    event: Event


@dataclass(frozen=True)
class Place:
    """Reserve every rank's resources -> `Placed` or `Unplaceable`."""


@dataclass(frozen=True)
class Prepare:
    """Start the rank processes and set them up -> `Ready` or `RankLost` from each."""


@dataclass(frozen=True)
class Load:
    """Have each rank take its layers from `start` -> `Loaded` or `RankLost` from each."""

    start: CheckpointRef | None


@dataclass(frozen=True)
class HostStore:
    """Have rank 0 open a store -> `StoreUp`, or `RankLost`."""


@dataclass(frozen=True)
class Join:
    """Have each rank join -> `Joined` or `RankLost` from each."""

    generation: Generation


@dataclass(frozen=True)
class Train:
    """Have each rank train -> `Reported`s, then `Ended` or `RankLost` from each."""


@dataclass(frozen=True)
class Ask:
    """Drop a request into rank 0's mailbox."""

    request: Request


@dataclass(frozen=True)
class Leave:
    """Tell `ranks` to drop the process group, so that a blocked call raises."""

    ranks: frozenset[int]


@dataclass(frozen=True)
class Wait:
    """-> `GraceOver` after `seconds`."""

    seconds: float


@dataclass(frozen=True)
class Release:
    """Give back ranks and reservations -> `Released`."""


Command = Log | Place | Prepare | Load | HostStore | Join | Train | Ask | Leave | Wait | Release
