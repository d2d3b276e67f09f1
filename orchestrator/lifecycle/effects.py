"""Effects that the lifecycle has the event loop carry out, as values. Each docstring says which stimulus answers it.

Not here: clients' commands (`orchestrator/commands/`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from orchestrator.events.types import Event, Regrouped
from orchestrator.lifecycle.recovery import Handover, RecoveryPlan, Rescue
from orchestrator.lifecycle.states import State
from planner.arrivals import Arrivals
from planner.freezing import FreezePlan
from planner.ir import Schedule
from planner.plan import Plan
from planner.shards import Piece
from workers.protocol.orders import Assignment, CommitOutcome, Generation, Request


@dataclass(frozen=True)
class AppendToLog:
    """Append to the event log."""

    event: Event


@dataclass(frozen=True)
class LogRegroup:
    """Append to the event log, with the durations of the regroup filled in."""

    event: Regrouped


@dataclass(frozen=True)
class Reserve:
    """Reserve the resources of `ranks` -> `Placed` or `Unplaceable`."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Prepare:
    """Start the processes of `ranks` and set them up -> `Ready` or `RankLost` from each."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Recruit:
    """Place and prepare more ranks while the job goes on -> `Ready` or `RankLost` from each."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Reclaim:
    """Have the ranks of an earlier controller report to this one -> `Reclaimed` or `RankLost` from each."""

    ranks: frozenset[int]
    round: int


@dataclass(frozen=True)
class Assess:
    """Have `ranks` drop their process group and report their positions -> `Positioned` or `RankLost` from
    each, and before it what its training raised. A rank that does not answer is killed. Effects of earlier
    rounds are cancelled."""

    ranks: frozenset[int]
    round: int
    generation: int = 0
    """The newest one: it is over, also for ranks that have not joined it yet."""


@dataclass(frozen=True)
class FinishCommit:
    """Have the ranks finish the commit at which they ended, once those that lack its records have them ->
    `CommitFinished` or `RankLost` from each. If the rank that is to send them is lost, that is all that is answered."""

    ranks: frozenset[int]
    commit_outcome: CommitOutcome
    round: int
    handover: Handover | None = None


@dataclass(frozen=True)
class Save:
    """Have idle ranks write a checkpoint of what they hold -> `Reported`, with the error if it failed."""

    rescue: Rescue
    plan: Plan
    """For the manifest."""
    generation: int


@dataclass(frozen=True)
class MakePlan:
    """Make a plan -> `Planned` or `Unplannable`."""

    recovery_plan: RecoveryPlan
    first: Plan | None
    """The job's first plan: only its standbys are to be chosen. None: any plan for the ranks in
    `recovery_plan.lineup`."""
    domains: Mapping[int, str]
    """Rank -> its failure domain."""
    epoch: int
    version: int
    round: int


@dataclass(frozen=True)
class Follow:
    """Have each rank load its layers -> `Loaded` or `RankLost` from each."""

    assignments: Mapping[int, Assignment]
    """By rank."""
    round: int


@dataclass(frozen=True)
class HostStore:
    """Have `rank` open a store -> `StoreUp`, or `RankLost`."""

    rank: int
    round: int


@dataclass(frozen=True)
class Join:
    """Have each member join the process group -> `Joined` or `RankLost` from each."""

    generation: Generation
    round: int


@dataclass(frozen=True)
class Train:
    """Have `ranks` train -> `Reported`s, then `Ended`, `Departed` or `RankLost` from each."""

    ranks: tuple[int, ...]
    step: int
    """Steps committed so far."""
    round: int
    under_way: bool = False
    """They train already: only wait for the outcome."""


@dataclass(frozen=True)
class Ask:
    """Put a request into `rank`'s mailbox."""

    request: Request
    rank: int


@dataclass(frozen=True)
class Propose:
    """Put a freeze plan into the mailbox of each of `ranks`; they adopt it at a commit."""

    plan: FreezePlan
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Switch:
    """Put another plan into the mailbox of each of `ranks`; they switch at a commit at which all are ready."""

    plan: Plan
    schedule: Schedule
    held: Arrivals
    """Layers, or shards, whose updates are held under this plan, and where they move to."""
    ranks: tuple[int, ...]
    generation: int
    """The generation of these ranks; they ignore the plan once it is over."""
    building: Mapping[int, tuple[Piece, ...]] = field(default_factory=dict)
    """Rank -> layers, or shards, that it builds beside training, for the generation after this one."""


@dataclass(frozen=True, kw_only=True)
class CopyAside:
    """Have ranks without a place copy layers while the others train -> `Reported` with `CopiedAhead` from each. Those
    that are to copy none let go of what they have copied and built, and report nothing."""

    pieces: Mapping[int, Mapping[Piece, int]]
    """Rank -> layer, or shard of it -> its owner."""
    building: Mapping[int, tuple[Piece, ...]]
    """Rank -> layers, or shards, that it builds of them, because its generation cuts layers otherwise."""
    freeze: tuple[FreezePlan, ...]
    """With known starts."""
    epoch: int
    change: int
    """The number of the planned change, or of the order to let go."""
    generation: int
    patience_s: float
    """Time that they keep the copies up to date."""


@dataclass(frozen=True)
class PlanAhead:
    """Make the plan of a coming generation while this one trains -> `PlannedAhead`."""

    now: Plan
    members: tuple[int, ...]
    """The ranks that follow `now`, by place."""
    lineup: tuple[int, ...]
    """The coming generation's, by place."""
    domains: Mapping[int, str]
    """Rank -> its failure domain."""
    reason: str
    number: int
    """Number of the change."""


@dataclass(frozen=True)
class Weigh:
    """Compute whether the best plan for more ranks, or for the layers that are frozen by now, is worth a regroup ->
    `Weighed`."""

    now: Plan
    ranks: tuple[int, ...]
    """Ranks that the plan may use, in the order of places."""
    domains: tuple[str, ...]
    """The failure domain of each of them."""
    step: int
    """Steps committed so far."""
    round: int
    prefix: int = 0
    """The first step of the frozen prefix that it counts on, to be told again."""


@dataclass(frozen=True)
class Dismiss:
    """End the processes of `ranks` and give their resources back."""

    ranks: frozenset[int]


@dataclass(frozen=True)
class Wait:
    """-> `WaitOver` after `seconds`."""

    seconds: float
    pause: int


@dataclass(frozen=True)
class AwaitRanks:
    """-> `RanksOverdue` after `seconds`."""

    seconds: float
    id: str
    """Id of the command that asked for them."""


@dataclass(frozen=True)
class AwaitCopies:
    """-> `CopiesOverdue` after `seconds`."""

    seconds: float
    ranks: frozenset[int] = frozenset()
    change: int = 0


@dataclass(frozen=True)
class Release:
    """Give back ranks and reservations -> `Released`."""


Effect = (
    AppendToLog
    | LogRegroup
    | Reserve
    | Prepare
    | Recruit
    | Reclaim
    | Assess
    | FinishCommit
    | Save
    | MakePlan
    | Follow
    | HostStore
    | Join
    | Train
    | Ask
    | Propose
    | Switch
    | CopyAside
    | PlanAhead
    | Weigh
    | Dismiss
    | Wait
    | AwaitRanks
    | AwaitCopies
    | Release
)

Next = TypeVar("Next", bound=State)
Step = tuple[Next, tuple[Effect, ...]]
"""Result of a transition: the next state, and the effects to carry out. What a transition declares here is drawn in
`docs/architecture/lifecycle.md`."""
