"""A job as its commands see it: the part of a `JobView` that their words, choices and changes are made from.

History keeps the commands of a job and imports this room: hence the protocols.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from orchestrator.events.types import Noticed
    from planner.plan import Plan
    from workers.protocol.reports import CheckpointReport

NO_PLAN = "the job has no plan yet"


class SeenRanks(Protocol):
    """The ranks of a job: see `RanksView`."""

    members: tuple[int, ...]
    alive: set[int]
    nodes: dict[int, str]
    hosts: dict[int, str]
    drained: dict[str, Noticed]

    @property
    def spares(self) -> Collection[int]: ...


class SeenJob(Protocol):
    """A job: see `JobView`."""

    state: str
    step: int
    spec: dict[str, Any]
    plan: Plan | None
    followed: Plan | None

    @property
    def ranks(self) -> SeenRanks: ...

    @property
    def checkpoints(self) -> Sequence[CheckpointReport]: ...

    def freeze_section_at(self, step: int) -> Mapping[str, Any]: ...


def plan_of(job: SeenJob) -> Plan | None:
    """The plan that the ranks follow, or are about to follow."""
    return job.followed or job.plan


def ranks_on(job: SeenJob, node: str) -> set[int]:
    """The ranks on a node, named by its id, the beginning of one, or its host."""
    return {
        rank
        for rank, home in job.ranks.nodes.items()
        if home.startswith(node) or job.ranks.hosts.get(rank) == node
    }
