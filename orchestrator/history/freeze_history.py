"""What a resumed or a replayed run must know of the freezing before it. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.events.types import FreezeSolved
from planner.freeze.monitoring import Observation
from planner.freezing import FreezePlan
from planner.plan import Plan
from workers.protocol import TimelineReport


@dataclass(frozen=True, kw_only=True)
class FreezeHistory:
    """What was measured and decided so far."""

    plans: tuple[FreezePlan, ...] = ()
    """The decisions, each with its `start`, in that order."""
    monitored: tuple[TimelineReport, ...] = ()
    """The newest timeline of each step and rank, all of one partition."""
    plan: Plan | None = None
    """The newest plan, with which they were measured."""
    solved: FreezeSolved | None = None
    """Where the newest decision came from."""
    replayed: bool = False
    """The run follows `plans` and decides nothing itself."""

    def monitored_with(self, plan: Plan) -> tuple[TimelineReport, ...]:
        """What was measured, if `plan` cuts the model as it was cut then: other stages have other times."""
        return self.monitored if self.plan is not None and cut(self.plan) == cut(plan) else ()


def observation(report: TimelineReport) -> Observation:
    """`report` as the planner reads it, which knows nothing of ranks' messages."""
    return Observation(
        step=report.step,
        rank=report.rank,
        step_s=report.step_s,
        spans=tuple((span.action, span.start_s, span.end_s) for span in report.spans),
    )


def cut(plan: Plan) -> tuple[object, ...]:
    """What of `plan` the times of its actions depend on."""
    return plan.layers, plan.stage_ranks, plan.schedule, plan.chunks, plan.recompute, plan.replicas
