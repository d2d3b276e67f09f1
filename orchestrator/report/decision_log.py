"""Every decision about a job with its reason: plans with their candidates, regroupings, freeze ratios, moves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime

from orchestrator.history.job_view import Decision, JobView
from orchestrator.quantities import percent, seconds, size
from orchestrator.report.parts import Table
from orchestrator.report.planning import considered
from planner.wording import counted


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One decision."""

    time_s: float
    step: int
    """Steps committed then."""
    what: str
    reason: str
    numbers: str = ""
    """What the simulator expects of it, or what it cost."""
    candidates: Table | None = None

    @property
    def when(self) -> str:
        """The time of day."""
        return datetime.fromtimestamp(self.time_s, UTC).strftime("%H:%M:%S UTC")

    @property
    def brief(self) -> Entry:
        """Without candidates."""
        return replace(self, candidates=None)


def decision_log(run: JobView) -> tuple[Entry, ...]:
    """The newest decisions, newest first."""
    entries = [_plan(decision) for decision in run.decisions]
    entries += [
        Entry(
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
    return tuple(sorted(entries, key=lambda entry: entry.time_s, reverse=True))


def _plan(decision: Decision) -> Entry:
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
    return Entry(
        time_s=decision.time_s,
        step=decision.step,
        what=f"plan {plan.epoch}.{plan.version}",
        reason=plan.reason,
        numbers=", ".join(numbers),
        candidates=considered(plan, decision.alternatives),
    )
