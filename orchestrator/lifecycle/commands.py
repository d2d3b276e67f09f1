"""What a job asks of its shell: the third of the three alphabets of `machine.py`. Each says what answers it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.events.types import Event, Regrouped
from orchestrator.lifecycle.recovery import RecoveryPlan, Rescue
from planner.freezing import FreezePlan
from planner.ir import Schedule
from planner.plan import Plan
from workers.protocol import Assignment, Generation, Request, Settlement


@dataclass(frozen=True)
class Log:
    """Append to the event log."""

    event: Event


@dataclass(frozen=True)
class LogRegroup:
    """Append to the event log, with the times that the regroup took."""

    event: Regrouped


@dataclass(frozen=True)
class Place:
    """Reserve the resources of `ranks` -> `Placed` or `Unplaceable`."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Prepare:
    """Start the processes of `ranks` and set them up -> `Ready` or `RankLost` from each."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Recruit:
    """`Place` and `Prepare` at once, beside everything else -> `Ready` or `RankLost` from each."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Reclaim:
    """Have the ranks of an earlier controller report to this one -> `Reclaimed` or `RankLost` from each."""

    ranks: frozenset[int]
    round: int


@dataclass(frozen=True)
class Assess:
    """Have `ranks` drop their process group and say where they stand; who does not answer is killed -> `Positioned` or
    `RankLost` from each, and before it what its training raised. Commands of earlier rounds are given up."""

    ranks: frozenset[int]
    round: int
    generation: int = 0
    """The newest one: it is over, also for who has not joined it yet."""


@dataclass(frozen=True)
class Settle:
    """-> `Settled` or `RankLost` from each."""

    ranks: frozenset[int]
    settlement: Settlement
    round: int


@dataclass(frozen=True)
class Save:
    """Have ranks that do not train write what they hold -> a `Reported` checkpoint, or why it could not be written."""

    rescue: Rescue
    plan: Plan
    """For the manifest."""
    generation: int


@dataclass(frozen=True)
class MakePlan:
    """Have a plan made -> `Planned` or `Unplannable`."""

    recovery_plan: RecoveryPlan
    first: Plan | None
    """The plan to begin with: only its standbys are to be chosen. None: any plan for the ranks in `course.lineup`."""
    nodes: Mapping[int, str]
    epoch: int
    version: int
    round: int


@dataclass(frozen=True)
class Follow:
    """Have each rank take up its layers -> `Loaded` or `RankLost` from each."""

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
    """Have each member join -> `Joined` or `RankLost` from each."""

    generation: Generation
    round: int


@dataclass(frozen=True)
class Train:
    """Have `ranks` train -> `Reported`s, then `Ended`, `Departed` or `RankLost` from each."""

    ranks: tuple[int, ...]
    step: int
    """Steps committed before."""
    round: int
    under_way: bool = False
    """They train already: only hear how it ends."""


@dataclass(frozen=True)
class Ask:
    """Drop a request into `rank`'s mailbox."""

    request: Request
    rank: int


@dataclass(frozen=True)
class Propose:
    """Drop a freeze plan into the mailbox of each of `ranks`; they take it up at a commit."""

    plan: FreezePlan
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Switch:
    """Drop another plan into the mailbox of each of `ranks`; they follow it from a commit on at which all are ready."""

    plan: Plan
    schedule: Schedule
    held: tuple[tuple[int, int], ...]
    """(layer, place): layers whose updates are held while it is followed, and where they are to go."""
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Weigh:
    """Find out whether a plan for more ranks is worth a regroup -> `Weighed`."""

    now: Plan
    domains: tuple[str, ...]
    """Of each rank that there would be, its node."""
    step: int
    """Steps committed."""
    round: int


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
class Release:
    """Give back ranks and reservations -> `Released`."""


Command = (
    Log
    | LogRegroup
    | Place
    | Prepare
    | Recruit
    | Reclaim
    | Assess
    | Settle
    | Save
    | MakePlan
    | Follow
    | HostStore
    | Join
    | Train
    | Ask
    | Propose
    | Switch
    | Weigh
    | Dismiss
    | Wait
    | Release
)
