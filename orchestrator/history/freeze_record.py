"""What a job froze, folded from its events: solutions, ratios per step, how often each parameter was frozen.

Reads event values only; part of a `RunRecord`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from statistics import mean

from orchestrator.events.types import FreezeSolved
from orchestrator.history.frozen_counts import CountedSteps
from workers.protocol import FreezeReport, FreezeStarted, FrozenAction, FrozenCounts

RECENT_STEPS = 50
"""Of so many of the newest steps every action is kept."""


@dataclass
class FrozenStep:
    """What was frozen in one step, over all actions of all ranks."""

    actions: int = 0
    planned: float = 0.0
    """Sum over the actions, like the next two: shares of weight-gradient time."""
    actual: float = 0.0
    parameters: float = 0.0
    """Shares of all scalars."""

    def add(self, action: FrozenAction) -> None:
        self.actions += 1
        self.planned += action.planned
        self.actual += action.actual
        self.parameters += action.parameters


@dataclass
class FreezeRecord:
    """Everything that a report tells of freezing."""

    start: int | None = None
    """The first step that follows the newest ratios."""
    solved: FreezeSolved | None = None
    """The newest solution, taken up or not."""
    steps: dict[int, FrozenStep] = field(default_factory=dict)
    """Steps in which something could be frozen."""
    recent: dict[int, list[FrozenAction]] = field(default_factory=dict)
    """The actions of the newest `RECENT_STEPS` of them."""
    counted: CountedSteps = field(default_factory=CountedSteps)
    """How often each parameter was frozen, step by step."""
    counts: dict[int, FrozenCounts] = field(default_factory=dict)
    """By rank, since it followed its newest plan: all that older logs tell of parameters."""

    def take(self, event: FreezeSolved | FreezeStarted | FreezeReport | FrozenCounts) -> None:
        """Fold one more event in."""
        match event:
            case FreezeSolved():
                self.solved = event
            case FreezeStarted(plan=plan):
                self.start = plan.start
            case FreezeReport():
                self._add(event)
            case FrozenCounts(rank=rank):
                self.counts[rank] = event

    def _add(self, report: FreezeReport) -> None:
        if not self.counted.take(report):
            return
        step = self.steps.setdefault(report.step, FrozenStep())
        for action in report.actions:
            step.add(action)
        self.recent.setdefault(report.step, []).extend(report.actions)
        if len(self.recent) > RECENT_STEPS:
            del self.recent[min(self.recent)]

    def void_after(self, step: int) -> None:
        """Forget what came after `step`: it is run again."""
        self.steps = {number: frozen for number, frozen in self.steps.items() if number <= step}
        self.recent = {number: actions for number, actions in self.recent.items() if number <= step}
        self.counted.void_after(step)
        self.counts.clear()

    def average_ratio(self, steps: int) -> float | None:
        """TimelyFreeze's average freeze ratio (section 4.2) over the first `steps` steps: the share of scalars that
        was frozen, mean over steps, actions and scalars. None if nothing could be frozen yet."""
        if not self.steps or steps <= 0:
            return None
        return (
            sum(frozen.parameters / frozen.actions for frozen in self.steps.values() if frozen.actions)
            / steps
        )

    def recent_ratios(self) -> list[tuple[int, int, float]]:
        """(stage, microbatch, share of weight-gradient time that was frozen), mean over the recent steps."""
        seen: dict[tuple[int, int], list[float]] = defaultdict(list)
        for actions in self.recent.values():
            for action in actions:
                seen[action.stage, action.microbatch].append(action.actual)
        return [(stage, microbatch, mean(shares)) for (stage, microbatch), shares in sorted(seen.items())]
