"""The ranks of a job since its newest start, as a controller that takes over needs to know them.

Reads event values only; part of a `JobView`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from orchestrator.events.types import (
    Dismissed,
    Formed,
    Noticed,
    Paused,
    Placing,
    RankFailed,
    RankStarted,
    Regrouped,
    Scaled,
    Undrained,
)
from orchestrator.history.totals import part_seconds
from planner.failure_domains import domain_name
from planner.shards import Piece
from workers.protocol.errors import DamagedCheckpoint
from workers.protocol.orders import CheckpointRef
from workers.protocol.reports import CheckpointReport, StandbyReport, SwitchReport

RanksEvent = (
    Formed
    | Placing
    | RankStarted
    | RankFailed
    | Regrouped
    | Scaled
    | Dismissed
    | Paused
    | Noticed
    | Undrained
    | StandbyReport
    | SwitchReport
)
"""An event that a view of the ranks folds."""
KEPT_CHECKPOINTS = 8
"""Newest checkpoints that a controller remembers; the ranks delete older ones."""
REQUEST = "request"
"""The source of a notice that a user asked for: a drain, and no preemption."""
KEPT_NOTICES = 100
"""Newest notices and departures that are kept, of each."""


@dataclass(frozen=True, kw_only=True)
class NodeNotice:
    """A notice that a node would go, and when it arrived."""

    time_s: float
    """Seconds since the Unix epoch."""
    event: Noticed

    @property
    def deadline_s(self) -> float | None:
        """When the node is gone, in seconds since the Unix epoch; None if unknown."""
        return None if self.event.left_s is None else self.time_s + self.event.left_s


@dataclass(frozen=True, kw_only=True)
class Departure:
    """Ranks of one node that the job lost: they failed, or left after a notice."""

    time_s: float
    """When the job began to regroup without them, in seconds since the Unix epoch."""
    node: str
    """Node id of the cluster; empty if unknown."""
    host: str
    ranks: tuple[int, ...]
    noticed: bool
    """Whether a notice came before."""


@dataclass
class RanksView:
    """The ranks of the newest start, and their checkpoints."""

    members: tuple[int, ...] = ()
    """Ranks of the newest generation, by place."""
    alive: set[int] = field(default_factory=set)
    """Ranks that are up: members, spares and newcomers."""
    placing: set[int] = field(default_factory=set)
    """Ranks that wait for resources or start."""
    going: set[int] = field(default_factory=set)
    """Ranks on nodes under notice."""
    nodes: dict[int, str] = field(default_factory=dict)
    """Rank -> node id."""
    hosts: dict[int, str] = field(default_factory=dict)
    """Rank -> address of its node."""
    machines: dict[int, str] = field(default_factory=dict)
    """Rank -> its hardware and library; empty if they are unknown."""
    zones: dict[str, str] = field(default_factory=dict)
    """Node id -> the node's zone; empty if it is unknown."""
    drained: dict[str, Noticed] = field(default_factory=dict)
    """Node id -> the command's notice, of each node that a command drained and none has undrained."""
    next_rank: int = 0
    """The first number that no rank has had."""
    notices: tuple[NodeNotice, ...] = ()
    """The newest notices, oldest first."""
    departures: tuple[Departure, ...] = ()
    """The newest departures, oldest first."""
    scaled: Scaled | None = None
    """The size that was requested last since the start; None: the job is to have as many ranks as its spec says."""
    formed: Formed | None = None
    """The newest generation."""
    generation: int | None = None
    """Number of the newest generation; None if none has formed."""
    copied: dict[int, tuple[Piece, ...]] = field(default_factory=dict)
    """Place -> layers, or shards, of which it keeps an up-to-date copy, or a snapshot, for other places."""
    began: int = 0
    """The step at which it began to train."""
    since: int | None = None
    """The last generation that went back to a checkpoint or a snapshot; None if none did."""
    failures: int = 0
    """Number of failures of the job with no step committed beyond `failed_at`."""
    failed_at: int = -1
    checkpoints: tuple[CheckpointRef, ...] = ()
    """Newest first."""
    damaged: tuple[str, ...] = ()
    """Paths of damaged checkpoints."""

    @property
    def spares(self) -> set[int]:
        """Ranks that are up and have no place."""
        return self.alive - {*self.members} - self.going

    @property
    def noticed(self) -> tuple[Noticed, ...]:
        """The newest notices as events, and those of drained nodes."""
        newest = [notice.event for notice in self.notices]
        return (*(notice for notice in self.drained.values() if notice not in newest), *newest)

    def leaving(self, node: str) -> set[int]:
        """The ranks on `node` that are under notice and still there."""
        return {rank for rank in self.going & self.alive if self.nodes.get(rank) == node}

    def domain(self, rank: int) -> str:
        """The failure domain of `rank`, as far as it is known."""
        node = self.nodes.get(rank, "")
        return domain_name(node, self.zones.get(node, ""))

    def fold(self, event: RanksEvent, time_s: float = 0.0) -> None:
        """Fold one more event in.

        Args:
            time_s: of the event, in seconds since the Unix epoch; kept of notices and departures.
        """
        if isinstance(event, Formed | Paused):
            self.failures, self.failed_at = event.failures, event.failed_at
        match event:
            case Formed(generation=generation, step=step):
                self.formed = event
                self.copied.clear()
                self.members, self.generation, self.began = generation.members, generation.number, step
                if event.start is not None or event.snapshot or step == 0:
                    self.since = generation.number
            case Placing(ranks=ranks):
                self.placing |= {*ranks}
                self.next_rank = max(self.next_rank, *(rank + 1 for rank in ranks))
            case RankStarted(rank=rank, node=node, host=host, zone=zone, machine=machine):
                self.alive.add(rank)
                self.placing.discard(rank)
                self.nodes[rank], self.hosts[rank], self.zones[node] = node, host, zone
                self.machines[rank] = machine
                self.next_rank = max(self.next_rank, rank + 1)
            case RankFailed(rank=rank):
                # A rank that only raised may be alive; the controller asks it, like all others.
                self.placing.discard(rank)
                self.next_rank = max(self.next_rank, rank + 1)
            case Regrouped(lost=lost):
                self._depart(event, time_s)
                self._forget(lost)
            case Dismissed(ranks=ranks):
                self._forget(ranks)
            case Scaled():
                self.scaled = event
            case Paused(requested=True):
                self._let_go()
            case Noticed(ranks=ranks):
                self.going |= {*ranks}
                self.notices = (*self.notices[1 - KEPT_NOTICES :], NodeNotice(time_s=time_s, event=event))
                if event.source == REQUEST:
                    self.drained[event.node] = event
            case Undrained(node=node):
                self.drained.pop(node, None)
                asked = (REQUEST, node)
                self.notices = tuple(n for n in self.notices if (n.event.source, n.event.node) != asked)
            case StandbyReport(rank=place, pieces=pieces, given_up=True):
                self.copied[place] = tuple(sorted({*self.copied.get(place, ())} - {*pieces}))
            case StandbyReport(rank=place, pieces=pieces):
                self.copied[place] = tuple(sorted({*self.copied.get(place, ()), *pieces}))
            case SwitchReport(rank=place):
                # It reports the copies of its new plan again, once they are up to date.
                self.copied.pop(place, None)
            case Paused():
                pass

    def _let_go(self) -> None:
        """Forget all ranks and their nodes."""
        self.members = ()
        for known in (
            self.alive,
            self.placing,
            self.going,
            self.nodes,
            self.hosts,
            self.zones,
            self.machines,
        ):
            known.clear()

    def _depart(self, event: Regrouped, time_s: float) -> None:
        """Note which nodes' ranks were lost; ranks that were released on request have not departed."""
        began_s = time_s - sum(part_seconds(event).values())
        by_node: dict[tuple[str, str, bool], list[int]] = {}
        for rank in sorted(event.lost):
            noticed = rank in self.going
            if noticed or event.cause == "loss":
                key = self.nodes.get(rank, ""), self.hosts.get(rank, ""), noticed
                by_node.setdefault(key, []).append(rank)
        departed = (
            Departure(time_s=began_s, node=node, host=host, ranks=tuple(ranks), noticed=noticed)
            for (node, host, noticed), ranks in by_node.items()
        )
        self.departures = (*self.departures, *departed)[-KEPT_NOTICES:]

    def _forget(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self.alive.discard(rank)
            self.nodes.pop(rank, None)
            self.hosts.pop(rank, None)
            self.machines.pop(rank, None)

    def save(self, report: CheckpointReport) -> None:
        """Remember a written checkpoint."""
        if report.error is None and all(ref.path != report.path for ref in self.checkpoints):
            known = (CheckpointRef(path=report.path, step=report.step), *self.checkpoints)
            newest = sorted(known, key=lambda ref: ref.step, reverse=True)
            self.checkpoints = tuple(newest[:KEPT_CHECKPOINTS])

    def skip(self, damage: DamagedCheckpoint) -> None:
        """Forget a damaged checkpoint."""
        self.checkpoints = tuple(ref for ref in self.checkpoints if ref.path != damage.path)
        self.damaged = (*self.damaged, damage.path)[-10 * KEPT_CHECKPOINTS :]
