"""Rank speeds known to a job, and its decisions on them.

Reads event values only; part of a `JobView`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from statistics import median

from orchestrator.events.types import Adapted, LayersTimed, LinksTimed, Sampled, SpeedsChanged
from planner.adapt.past import NO_PAST, Past
from planner.simulation.slow_links import SlowLink

AdaptEvent = SpeedsChanged | Sampled | LayersTimed | LinksTimed | Adapted
"""An event that a record of adapting folds."""
KEPT = 300
"""Newest changes and decisions that are kept, of each."""


@dataclass(frozen=True)
class Speeds:
    """The ranks' slowdowns from a step on, in two figures."""

    step: int
    slowest: float
    median: float


@dataclass(frozen=True)
class SpeedChange:
    """The ranks or their links got other speeds."""

    time_s: float
    """When the job knew."""
    since: int
    """The first step with them."""


@dataclass(frozen=True)
class DatedDecision:
    """A decision, and when it was made."""

    time_s: float
    event: Adapted


@dataclass
class AdaptRecord:
    """The changes and decisions of the newest start."""

    known: tuple[tuple[int, float], ...] = ()
    """(rank, slowdown) of the ranks that were known last."""
    past: Past = NO_PAST
    """History of these speeds."""
    factors: tuple[tuple[float, float, float], ...] = ()
    """Factors on the layers' times, per layer; empty: the profile's times hold."""
    links: tuple[SlowLink, ...] = ()
    """Links that are slower than in the profile, by rank."""
    samples: list[Sampled] = field(default_factory=list)
    """Samples of the ranks' surroundings; ascending steps, every second one dropped where they are too many."""
    speeds: list[Speeds] = field(default_factory=list)
    """Ascending steps."""
    changes: list[SpeedChange] = field(default_factory=list)
    """Ascending times."""
    decisions: list[DatedDecision] = field(default_factory=list)

    def fold(self, event: AdaptEvent, time_s: float) -> None:
        """Add one event."""
        match event:
            case SpeedsChanged(slowdowns=known):
                older = Past(changed=tuple((rank, event.since) for rank, _ in known))
                before, self.known, self.past = dict(self.past.changed), known, event.past or older
                slowdowns = [slowdown for _, slowdown in known]
                # After a return to a checkpoint steps come again.
                kept = [each for each in self.speeds if each.step < event.step]
                self.speeds = [*kept, Speeds(event.step, max(slowdowns), median(slowdowns))][-KEPT:]
                # Otherwise they have only drifted.
                if changed := [since for rank, since in self.past.changed if before.get(rank) != since]:
                    self._change(time_s, min(changed))
            case Sampled():
                # After a return to a checkpoint steps come again.
                kept = [each for each in self.samples if each.step < event.step]
                self.samples = [*(kept if len(kept) < KEPT else kept[::2]), event]
            case LayersTimed(factors=factors):
                self.factors = factors
            case LinksTimed(links=links):
                self.links, self.past = links, replace(self.past, links_changed=event.step)
                self._change(time_s, event.step)
            case Adapted():
                self.decisions = [*self.decisions, DatedDecision(time_s, event)][-KEPT:]

    def _change(self, time_s: float, since: int) -> None:
        self.changes = [*self.changes, SpeedChange(time_s, since)][-KEPT:]
