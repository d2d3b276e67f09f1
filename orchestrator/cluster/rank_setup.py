"""What the process of a rank is started with. A value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from workers.config import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """The same for every rank of a job. It goes to no log: it holds the job's secret."""

    config: WorkerConfig
    per_rank: Mapping[str, float]
    """Resources that each rank reserves."""
    marker: tuple[str, bytes] | None
    """File in the job's folder by which a node knows it, and its content."""
    secret: bytes = field(repr=False)
    """By which ranks know each other where they hand layers over."""
