"""The decisions about a job, each with its reason: plans with their candidates (those that move layers too),
regroupings, what the ranks' speeds made of the cut, and freezing once the ranks follow it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime

from orchestrator.events.reports import report_sentence
from orchestrator.events.types import FreezeChanged
from orchestrator.history.job_view import IssuedPlan, JobView
from orchestrator.quantities import percent, seconds, size
from orchestrator.report.parts import Table
from orchestrator.report.run.planning import considered
from planner.freezing import FreezePlan
from planner.wording import counted, shares_text

KEPT_SPEEDS = 20
"""Newest decisions on the ranks' speeds that are shown."""
KEPT_FREEZINGS = 20
"""Newest freeze decisions that are shown."""


@dataclass(frozen=True, kw_only=True)
class DecisionEntry:
    """One decision."""

    time_s: float
    step: int
    """Steps committed then."""
    what: str
    reason: str
    numbers: str = ""
    """The simulator's prediction, or the measured cost."""
    candidates: Table | None = None

    @property
    def when(self) -> str:
        """The time of day."""
        return datetime.fromtimestamp(self.time_s, UTC).strftime("%H:%M:%S UTC")

    @property
    def brief(self) -> DecisionEntry:
        """Without candidates."""
        return replace(self, candidates=None)


def decision_log(run: JobView) -> tuple[DecisionEntry, ...]:
    """The newest decisions, newest first."""
    entries = [_plan(decision) for decision in run.decisions]
    entries += [
        DecisionEntry(
            time_s=each.trains_s if each.trains_s is not None else each.formed_s,
            step=each.regrouped.step,
            what=f"regrouped ({each.regrouped.cause}), generation {each.number}",
            reason=each.regrouped.reason,
            numbers=f"{counted(len(each.members), 'rank')}; {counted(each.regrouped.rerun, 'step')} in flight run"
            f" again, {counted(each.regrouped.steps_lost, 'committed step')} lost",
        )
        for each in run.recovery.regroupings
        if each.regrouped is not None
    ]
    entries += [
        DecisionEntry(
            time_s=each.time_s,
            step=each.event.step,
            what=each.event.verdict,
            reason=each.event.reason,
            numbers=f"predicted step {seconds(each.event.now_s)} now, {seconds(each.event.then_s)} with the best cut;"
            f" a move costs {seconds(each.event.cost_s)}",
        )
        for each in run.adapt.decisions[-KEPT_SPEEDS:]
    ]
    freezings = sorted(run.freeze.plans.items())[-KEPT_FREEZINGS:]
    entries += [_freezing(run, start, plan) for start, plan in freezings]
    entries += [
        DecisionEntry(
            time_s=_committed_s(run, first - 1),
            step=first - 1,
            what=f"prefix of {counted(prefix.layers, 'layer')}",
            reason=report_sentence(prefix),
        )
        for first, prefix in sorted(run.freeze.prefixes.items())[-KEPT_FREEZINGS:]
    ]
    return tuple(sorted(entries, key=lambda entry: (entry.time_s, entry.step), reverse=True))


def _plan(decision: IssuedPlan) -> DecisionEntry:
    plan = decision.plan
    numbers: list[str] = []
    if plan.predicted_step_s is not None:
        numbers.append(f"predicted step {seconds(plan.predicted_step_s)}")
    if plan.predicted_bubble is not None:
        numbers.append(f"bubble {percent(plan.predicted_bubble)}")
    if plan.predicted_peak_memory_bytes is not None:
        numbers.append(f"peak memory {size(plan.predicted_peak_memory_bytes)}")
    cut = " + ".join(str(stop - first) for first, stop in plan.layers)
    numbers.append(f"{plan.schedule}, layers per stage {cut}, {counted(plan.world_size, 'rank')}")
    if plan.shares:
        numbers.append(shares_text(plan.shares))
    return DecisionEntry(
        time_s=decision.time_s,
        step=decision.step,
        what=f"plan {plan.epoch}.{plan.version}",
        reason=plan.reason,
        numbers=", ".join(numbers),
        candidates=considered(plan, decision.alternatives),
    )


def _freezing(run: JobView, start: int, plan: FreezePlan) -> DecisionEntry:
    """The freeze decision `plan`, which the ranks follow from step `start` on."""
    solved, control = run.freeze.solved, plan.control
    settings_only = control is not None and not control.solved
    reasons = [_request(run, start, plan)]
    if not settings_only:
        reasons.append("the freeze program was solved")
    expected = solved.gain if solved is not None and solved.plan.key == plan.key else ""
    return DecisionEntry(
        time_s=_committed_s(run, start - 1),
        step=start - 1,
        what=f"freeze {'settings' if settings_only else 'ratios'} {plan.epoch}.{plan.version}",
        reason="; ".join(filter(None, reasons)),
        numbers=expected,
    )


def _request(run: JobView, start: int, plan: FreezePlan) -> str:
    """Who asked for the settings of `plan`, in words; empty if they are the spec's."""
    control = plan.control
    if control is None:
        return ""
    by = next((each.command.by for each in run.commands.entries.values() if each.freeze == plan.key), "")
    reason = run.freeze.reasons.get(start, "it chooses its method" if control.chosen else "")
    return FreezeChanged(
        from_step=start, method=control.method, r_max=control.r_max, by=by, plan=plan, reason=reason
    ).sentence


def _committed_s(run: JobView, step: int) -> float:
    """When `step` was committed, or the newest step before it whose commit is kept."""
    kept = [each.time_s for each in run.recovery.commits if each.step <= step and each.voided_by is None]
    return max(kept, default=0.0) or run.started_s
