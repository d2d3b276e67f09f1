"""Counts and sums over a job's whole log. They only grow, unlike the lists of a view, which are bounded.

Reads event values only; part of a `JobView`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.events.types import Event, Migrated, Regrouped, Stalled

PARTS = ("detect", "settle", "plan", "move", "resume")
"""Parts of a recovery."""


@dataclass
class Totals:
    """Totals of membership changes and moves, over all starts of a job."""

    recoveries: dict[str, int] = field(default_factory=dict)
    """Cause -> generations that replaced another one."""
    recovery_s: dict[str, dict[str, float]] = field(default_factory=dict)
    """Cause -> part -> seconds."""
    ranks_lost: dict[str, int] = field(default_factory=dict)
    """Cause -> ranks that failed or were released."""
    interrupted: int = 0
    """Interrupted steps that were run again."""
    stalls: int = 0
    """Number of times that a rank stood still and went on."""
    stalled_s: float = 0.0
    """Duration of the standstills, all ranks together."""
    moves: dict[str, int] = field(default_factory=dict)
    """Mode -> moves of layers between training ranks."""
    move_s: dict[str, float] = field(default_factory=dict)
    """Mode -> seconds from the request until all ranks followed the plan."""
    moved_bytes: int = 0
    """Bytes that were counted in moves."""

    def fold(self, event: Event) -> None:
        """Fold one more event in."""
        match event:
            case Regrouped(cause=cause):
                self.recoveries[cause] = self.recoveries.get(cause, 0) + 1
                self.ranks_lost[cause] = self.ranks_lost.get(cause, 0) + len(event.lost)
                self.interrupted += event.rerun
                spent_s = self.recovery_s.setdefault(cause, dict.fromkeys(PARTS, 0.0))
                for part, seconds in part_seconds(event).items():
                    spent_s[part] += seconds
            case Stalled(seconds=seconds):
                self.stalls += 1
                self.stalled_s += seconds
            case Migrated(mode=mode):
                self.moves[mode] = self.moves.get(mode, 0) + 1
                self.move_s[mode] = self.move_s.get(mode, 0.0) + event.seconds
                self.moved_bytes += event.bytes or 0
            case _:
                pass


def part_seconds(regrouped: Regrouped) -> dict[str, float]:
    """Seconds of each of `PARTS`, in order."""
    return {
        "detect": regrouped.detect_s,
        "settle": regrouped.settle_s,
        "plan": regrouped.plan_s,
        "move": regrouped.move_s,
        "resume": regrouped.resume_s,
    }
