"""What must be known to make and to direct the ranks of a job, beside its order. A value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.cluster.rank_setup import RankSetup
from planner.profile import Profile
from planner.search.replan import Replanner
from workers.config import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class ControllerConfig:
    """It goes to the controller, and to no log: it holds the job's secret."""

    config: WorkerConfig
    per_rank: Mapping[str, float]
    """Resources that each rank reserves."""
    wait_s: float
    """How long resources, and then processes, may take to come."""
    timeout_s: float
    """How long loading and joining may take."""
    marker: tuple[str, bytes] | None
    """File in the job's folder by which a node knows it, and its content."""
    replanner: Replanner
    secret: bytes = field(repr=False)
    """By which ranks know each other where they hand layers over."""
    profile: Profile | None = None
    """That the plan was made with, if it needed one."""

    @property
    def ranks(self) -> RankSetup:
        """What each rank's process is started with."""
        return RankSetup(config=self.config, per_rank=self.per_rank, marker=self.marker, secret=self.secret)
