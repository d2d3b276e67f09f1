"""Ranks that ran out of memory, and the memory limits of plans there since.

Reads event values only; part of a `JobView`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.events.types import MemoryLimited, OutOfMemory

KEPT = 100
"""Newest shortages that are kept."""


@dataclass
class MemoryRecord:
    """The memory of the newest start's ranks."""

    limits: dict[int, int] = field(default_factory=dict)
    """Rank -> the most memory that a plan may take there."""
    recompute: bool = False
    """Whether all layers that can do so recompute, because a job without a profile knows no smaller plan."""
    shortages: list[OutOfMemory] = field(default_factory=list)

    def fold(self, event: OutOfMemory | MemoryLimited) -> None:
        """Add one event."""
        match event:
            case OutOfMemory():
                self.shortages = [*self.shortages, event][-KEPT:]
            case MemoryLimited(limit_bytes=None):
                self.recompute = True
            case MemoryLimited(rank=rank, limit_bytes=int(limit)):
                self.limits[rank] = limit
