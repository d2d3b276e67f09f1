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
)
from workers.protocol import CheckpointRef, CheckpointReport, DamagedCheckpoint, StandbyReport, SwitchReport

KEPT_CHECKPOINTS = 8
"""Newest checkpoints that a controller remembers; the ranks delete older ones."""
KEPT_NOTICES = 100


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
    next_rank: int = 0
    """The first number that no rank has had."""
    noticed: tuple[Noticed, ...] = ()
    """The newest notices."""
    scaled: Scaled | None = None
    """The size that was requested last since the start; None: the job is to have as many ranks as its spec says."""
    formed: Formed | None = None
    """The newest generation."""
    generation: int | None = None
    """Number of the newest generation; None if none has formed."""
    copied: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Place -> layers of which it keeps an up-to-date copy for other places."""
    began: int = 0
    """The step at which it began to train."""
    since: int | None = None
    """The last generation that went back to a checkpoint; None if none did."""
    failures: int = 0
    """How often the job has failed with no step committed beyond `failed_at`."""
    failed_at: int = -1
    checkpoints: tuple[CheckpointRef, ...] = ()
    """Newest first."""
    damaged: tuple[str, ...] = ()
    """Paths of damaged checkpoints."""

    @property
    def spares(self) -> set[int]:
        """Ranks that are up and have no place."""
        return self.alive - {*self.members} - self.going

    def take(
        self,
        event: Formed
        | Placing
        | RankStarted
        | RankFailed
        | Regrouped
        | Scaled
        | Dismissed
        | Paused
        | Noticed
        | StandbyReport
        | SwitchReport,
    ) -> None:
        """Fold one more event in."""
        if isinstance(event, Formed | Paused):
            self.failures, self.failed_at = event.failures, event.failed_at
        match event:
            case Formed(generation=generation, step=step):
                self.formed = event
                self.copied.clear()
                self.members, self.generation, self.began = generation.members, generation.number, step
                if event.start is not None or step == 0:
                    self.since = generation.number
            case Placing(ranks=ranks):
                self.placing |= {*ranks}
                self.next_rank = max(self.next_rank, *(rank + 1 for rank in ranks))
            case RankStarted(rank=rank, node=node, host=host):
                self.alive.add(rank)
                self.placing.discard(rank)
                self.nodes[rank], self.hosts[rank] = node, host
                self.next_rank = max(self.next_rank, rank + 1)
            case RankFailed(rank=rank):
                # A rank that only raised may be alive; the controller asks it, like all others.
                self.placing.discard(rank)
                self.next_rank = max(self.next_rank, rank + 1)
            case Regrouped(lost=lost):
                self._forget(lost)
            case Dismissed(ranks=ranks):
                self._forget(ranks)
            case Scaled():
                self.scaled = event
            case Paused(requested=True):
                self.members = ()
                for known in (self.alive, self.placing, self.going, self.nodes, self.hosts):
                    known.clear()
            case Noticed(ranks=ranks):
                self.going |= {*ranks}
                self.noticed = (*self.noticed[1 - KEPT_NOTICES :], event)
            case StandbyReport(rank=place, layers=layers):
                self.copied[place] = layers
            case SwitchReport(rank=place):
                # It reports the copies of its new plan again, once they are up to date.
                self.copied.pop(place, None)
            case Paused():
                pass

    def _forget(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self.alive.discard(rank)
            self.nodes.pop(rank, None)
            self.hosts.pop(rank, None)

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
