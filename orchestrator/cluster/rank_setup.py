"""The arguments with which a rank's process starts. A value."""

from __future__ import annotations

from dataclasses import dataclass, field

from workers.config import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """The same for every rank of a job. Never log it: it holds the job's secret."""

    config: WorkerConfig
    marker: tuple[str, bytes] | None
    """File by which a node recognizes the job's folder, and its content."""
    secret: bytes = field(repr=False)
    """Authenticates ranks to each other when they transfer layers."""
