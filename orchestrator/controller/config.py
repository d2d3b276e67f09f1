"""Configuration that the controller needs besides the order to start and direct a job's ranks. A value."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.cluster.rank_setup import RankSetup
from orchestrator.events.types import WeightsUnmatched
from planner.profile import Profile
from planner.search.replan import Replanner
from workers.config import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class ControllerConfig:
    """The controller's configuration. Never log it: it holds the job's secret."""

    config: WorkerConfig
    marker: tuple[str, bytes] | None
    """File by which a node recognizes the job's folder, and its content."""
    replanner: Replanner
    secret: bytes = field(repr=False)
    """Authenticates ranks to each other when they transfer layers."""
    profile: Profile | None = None
    """The profile that the plan was made with, if it needed one."""
    forest: bytes | None = field(default=None, repr=False)
    """The interference model of the ranks' machine, as `planner/interference/model_file.py` writes it; None: the job
    uses none."""

    unmatched: WeightsUnmatched | None = None
    """Differences between the model and the files of weights that its family reads."""
    train_samples: int = 0
    """Training samples; 0: unknown."""

    @property
    def ranks(self) -> RankSetup:
        """Setup with which each rank's process is started."""
        return RankSetup(config=self.config, marker=self.marker, secret=self.secret)
