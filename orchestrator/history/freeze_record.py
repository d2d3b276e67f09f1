"""Freezing of a job: settings, decisions, solutions, ratios per step, freeze counts per parameter.

A decision holds from the step that it was logged for, also if that step is run again. Reads event values only; part of
a `JobView`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Annotated, Any

from orchestrator.events.types import FreezeChanged, FreezeSolved, LayoutWeighed
from orchestrator.history.columns import Columns
from orchestrator.history.freeze_history import still_proposed
from orchestrator.history.frozen_counts import CountedSteps
from orchestrator.history.thinning import Grid, thin, up_to
from planner.freezing import AUTO, Budget, FreezePlan, has_program, prefix_rule
from workers.protocol.reports import (
    ActivationsKept,
    ActivationsUsed,
    FreezeReport,
    FreezeStarted,
    FrozenAction,
    PrefixFrozen,
)

FreezeEvent = (
    FreezeSolved
    | FreezeChanged
    | FreezeStarted
    | FreezeReport
    | PrefixFrozen
    | LayoutWeighed
    | ActivationsKept
    | ActivationsUsed
)
"""Events about freezing."""
RECENT_STEPS = 50
"""Newest steps of which every action is kept."""
RECENT_ACTIONS = 2_000
"""Most actions that are kept, where a step has many."""
MOST_WEIGHED = 40
"""Newest layouts that were weighed of which the record tells."""
NEWEST_ENERGIES = 3
"""Steps over which the energies of layers are a running mean."""


@dataclass
class FrozenStep:
    """Freezing in one step or in consecutive steps, over all actions of all ranks."""

    actions: int = 0
    planned: float = 0.0
    """Sum over the actions, like the next two: shares of weight-gradient time."""
    actual: float = 0.0
    parameters: float = 0.0
    """Sum of the shares of all scalars."""
    steps: int = 1

    def add(self, action: FrozenAction) -> None:
        self.actions += 1
        self.planned += action.planned
        self.actual += action.actual
        self.parameters += action.parameters


@dataclass
class KeptFound:
    """Microbatches of which what frozen layers make was found, of all ranks, since they told before."""

    found: int = 0
    passed: int = 0
    """Microbatches that went through frozen layers from the first one on, or from what was kept of fewer."""


@dataclass
class FreezeRecord:
    """Everything in a log about freezing."""

    method: str = "none"
    """The settings that the newest steps follow: the spec's, until someone changes them."""
    r_max: Budget | None = None
    """None where the method has no budget."""
    least_update: float | None = None
    """The newest least share of a step's progress that is to be left; it holds while `r_max` is `auto`."""
    alpha: float | None = None
    """The newest bound of PipeTransformer's rule; it holds while the method is that."""
    by_hand: int | None = None
    """Layers that the method `prefix` freezes, by the newest request or by the spec; it holds while the method is that.
    None: none but those of `freeze.schedule`."""
    since: int = 1
    """The first step that follows these settings."""
    start: int | None = None
    """The first step that follows the newest ratios."""
    solved: FreezeSolved | None = None
    """The newest solution, adopted or not."""
    energies: tuple[float, ...] = ()
    """Per layer, the running mean of its gradient's energy in the steps that told: where it is frozen as a whole, as it
    was before. Empty: nothing has been solved yet."""
    proposed: FreezePlan | None = None
    """A decision of the newest start that the ranks have not adopted yet."""
    reason: str = ""
    """Why the job itself proposes it; empty: someone else does."""
    plans: dict[int, FreezePlan] = field(default_factory=dict)
    """The decisions, by the step they start at."""
    reasons: dict[int, str] = field(default_factory=dict)
    """Why the job itself changed its settings, by the step that the decision starts at."""
    steps: Annotated[dict[int, FrozenStep], Columns(FrozenStep)] = field(default_factory=dict)
    """Steps in which something could be frozen."""
    recent: dict[int, list[FrozenAction]] = field(default_factory=dict)
    """The actions of the newest `RECENT_STEPS` such steps."""
    prefixes: dict[int, PrefixFrozen] = field(default_factory=dict)
    """The layers frozen as a whole, by the step from which on they are."""
    weighed: list[LayoutWeighed] = field(default_factory=list)
    """The newest other layouts that were weighed, taken or not."""
    kept: dict[int, ActivationsKept] = field(default_factory=dict)
    """Layers -> the newest trial of whether what they make of training samples is kept while they are frozen."""
    used: dict[int, KeptFound] = field(default_factory=dict)
    """Counts of what was found of it, by the step up to which ranks told."""
    counted: CountedSteps = field(default_factory=CountedSteps)
    """Freeze counts of each parameter, step by step."""

    @property
    def newest(self) -> FreezePlan | None:
        """The decision that starts last."""
        return self.plans[max(self.plans)] if self.plans else None

    @property
    def prefix(self) -> PrefixFrozen | None:
        """The layers frozen as a whole; None where there never were any."""
        return self.prefixes[max(self.prefixes)] if self.prefixes else None

    @property
    def frozen_layers(self) -> int:
        """Their number; it may be of a step whose commit is not told yet."""
        return 0 if self.prefix is None else self.prefix.layers

    def prefix_at(self, step: int) -> int:
        """Layers frozen as a whole in `step`, as far as it is known."""
        begun = [first for first in self.prefixes if first <= step]
        return self.prefixes[max(begun)].layers if begun else 0

    def sections(self, spec: Mapping[str, Any]) -> tuple[tuple[int, Mapping[str, Any]], ...]:
        """(first step, the `[freeze]` section from there on), oldest first; `spec` is the job's own section."""
        changed = [(start, plan) for start, plan in sorted(self.plans.items()) if plan.control is not None]
        return (1, spec), *((start, {**spec, **plan.settings}) for start, plan in changed)

    def fold(self, event: FreezeEvent) -> None:
        """Fold one more event in."""
        match event:
            case FreezeSolved(plan=plan):
                self.solved, self.proposed = event, plan
                self.energies = self.energies or event.energies
            case FreezeChanged(plan=plan, reason=reason):
                self.proposed, self.reason = plan, reason
            case FreezeStarted(plan=plan):
                assert plan.start is not None, "a plan that ranks took up has a start"
                if self.reason and self.proposed is not None and self.proposed.key == plan.key:
                    self.reasons[plan.start] = self.reason
                    self.reason = ""
                self.proposed = still_proposed(self.proposed, plan)
                self.plans[plan.start] = plan
                self._follow(plan)
                if plan.control is None or plan.control.solved:
                    self.start = plan.start
            case PrefixFrozen():
                self.prefixes[event.step] = event
            case LayoutWeighed():
                self.weighed = [*self.weighed, event][-MOST_WEIGHED:]
            case ActivationsKept(held_out=held_out, layers=layers):
                if not held_out:
                    self.kept[layers] = event
            case ActivationsUsed():
                found = self.used.setdefault(event.step, KeptFound())
                found.found += event.hits
                found.passed += event.partly + event.misses
            case FreezeReport():
                self._add(event)

    def begin(self, spec: Mapping[str, Any], *, resume: bool) -> None:
        """Start the job with the resolved `[freeze]` section `spec`; unless it resumes, no earlier decision holds. A
        solution that was not adopted is solved again, but a request stands."""
        self.method, self.since = str(spec.get("method", "none")), 1
        self.r_max = spec.get("r_max") if has_program(self.method) else None
        self.least_update, self.alpha = spec.get("least_update"), spec.get("alpha")
        self.by_hand = spec.get("prefix")
        if not resume or (self.proposed is not None and self.proposed.control is None):
            self.proposed = None
        if not resume:
            self.solved, self.plans, self.prefixes, self.reasons = None, {}, {}, {}
            self.reason, self.energies = "", ()
            self.kept, self.used, self.weighed = {}, {}, []
        for _, plan in sorted(self.plans.items()):
            self._follow(plan)

    @property
    def confirmed(self) -> float:
        """Share of the saving with everything frozen that monitored steps have shown; 1 before any have."""
        return 1.0 if self.solved is None else self.solved.confirmed

    def measure(self, energies: Sequence[float]) -> None:
        """Take the energies that a step told of, per layer: 0 where it is frozen as a whole."""
        if self.energies and energies:
            told = zip(self.energies, energies, strict=True)
            self.energies = tuple(
                before + (now - before) / NEWEST_ENERGIES if now > 0.0 else before for before, now in told
            )

    def take_back(self, step: int) -> None:
        """Forget the measurements after `step`."""
        self.steps, self.recent = up_to(self.steps, step), up_to(self.recent, step)
        self.used = up_to(self.used, step)
        self.prefixes = {first: prefix for first, prefix in self.prefixes.items() if first <= step + 1}
        self.weighed = [each for each in self.weighed if each.prefix <= step + 1]
        self.counted.take_back(step)

    def thin(self, grid: Grid) -> None:
        """Keep one entry per bucket of `grid`."""
        self.steps = thin(self.steps, grid, _sum)
        self.used = thin(self.used, grid, _sum_of_found)

    def average_ratio(self, steps: int) -> float | None:
        """TimelyFreeze's average freeze ratio (section 4.2) over the first `steps` steps: the share of frozen scalars,
        mean over steps, actions and scalars. None if nothing could be frozen yet."""
        if not self.steps or steps <= 0:
            return None
        return (
            sum(
                frozen.steps * frozen.parameters / frozen.actions
                for frozen in self.steps.values()
                if frozen.actions
            )
            / steps
        )

    def recent_ratios(self) -> list[tuple[int, int, float]]:
        """(stage, microbatch, frozen share of weight-gradient time), mean over the recent steps."""
        seen: dict[tuple[int, int], list[float]] = defaultdict(list)
        for actions in self.recent.values():
            for action in actions:
                seen[action.stage, action.microbatch].append(action.actual)
        return [(stage, microbatch, mean(shares)) for (stage, microbatch), shares in sorted(seen.items())]

    def _follow(self, plan: FreezePlan) -> None:
        control = plan.control
        if control is None:
            return
        r_max = control.r_max if has_program(control.method) else None
        before = self._in_force()
        self.method, self.r_max = control.method, r_max
        if control.least_update is not None:
            self.least_update = control.least_update
        if control.alpha is not None:
            self.alpha = control.alpha
        if control.prefix is not None:
            self.by_hand = control.prefix
        if self._in_force() != before:
            assert plan.start is not None, "a plan that ranks took up has a start"
            self.since = plan.start

    def _in_force(self) -> tuple[object, ...]:
        """The settings that the method follows."""
        rule = prefix_rule(self.method)
        of_prefix = {"pipetransformer": self.alpha, "prefix": self.by_hand}.get(rule or "")
        return self.method, of_prefix, self.r_max, self.least_update if self.r_max == AUTO else None

    def _add(self, report: FreezeReport) -> None:
        if not self.counted.fold(report):
            return
        step = self.steps.setdefault(report.step, FrozenStep())
        for action in report.actions:
            step.add(action)
        self.recent.setdefault(report.step, []).extend(report.actions)
        kept = sum(len(actions) for actions in self.recent.values())
        if len(self.recent) > RECENT_STEPS or (kept > RECENT_ACTIONS and len(self.recent) > 2):
            del self.recent[min(self.recent)]


def _sum(earlier: FrozenStep, later: FrozenStep) -> FrozenStep:
    return FrozenStep(
        actions=earlier.actions + later.actions,
        planned=earlier.planned + later.planned,
        actual=earlier.actual + later.actual,
        parameters=earlier.parameters + later.parameters,
        steps=earlier.steps + later.steps,
    )


def _sum_of_found(earlier: KeptFound, later: KeptFound) -> KeptFound:
    return KeptFound(found=earlier.found + later.found, passed=earlier.passed + later.passed)
