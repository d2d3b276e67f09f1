"""What a job learned of its ranks' speeds, and what it decided on that.

Reads event values only; part of a `JobView`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.events.types import Adapted, SpeedsChanged

KEPT = 300
"""How many of the newest changes and decisions are kept, of each."""


@dataclass(frozen=True)
class Decided:
    """A decision, and when it was made."""

    time_s: float
    event: Adapted


@dataclass
class AdaptRecord:
    """The changes and decisions of a job."""

    speeds: list[SpeedsChanged] = field(default_factory=list)
    """The newest last: it has every rank that is known."""
    decisions: list[Decided] = field(default_factory=list)

    @property
    def known(self) -> tuple[tuple[int, float], ...]:
        """(rank, slowdown) of the ranks that were known last."""
        return self.speeds[-1].slowdowns if self.speeds else ()

    def take(self, event: SpeedsChanged | Adapted, time_s: float) -> None:
        """Add one event."""
        match event:
            case SpeedsChanged():
                self.speeds.append(event)
                del self.speeds[:-KEPT]
            case Adapted():
                self.decisions.append(Decided(time_s, event))
                del self.decisions[:-KEPT]
