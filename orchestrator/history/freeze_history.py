"""Earlier freezing that a resumed or replayed run must know. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.events.types import FreezeSolved
from planner.freeze.monitoring import Observation
from planner.freezing import FreezePlan
from planner.plan import Plan
from workers.protocol.reports import PrefixFrozen, TimelineReport


@dataclass(frozen=True, kw_only=True)
class FreezeHistory:
    """The measurements and decisions so far."""

    plans: tuple[FreezePlan, ...] = ()
    """The decisions, each with its `start`, ordered by it."""
    monitored: tuple[TimelineReport, ...] = ()
    """The newest timeline of each step and rank, all of one partition."""
    plan: Plan | None = None
    """The newest plan, with which the timelines were measured."""
    solved: FreezeSolved | None = None
    """Where the newest decision came from."""
    proposed: FreezePlan | None = None
    """A change of the settings that was logged before the run ended, and not adopted."""
    prefixes: tuple[PrefixFrozen, ...] = ()
    """The layers frozen as a whole, ordered by the step from which on they are."""
    replayed: bool = False
    """The run follows `plans` and decides nothing itself."""

    def prefix_after(self, step: int) -> PrefixFrozen | None:
        """The layers frozen as a whole after `step`; None where there never were any."""
        return next((one for one in reversed(self.prefixes) if one.step <= step + 1), None)

    def monitored_with(self, plan: Plan) -> tuple[TimelineReport, ...]:
        """The timelines, if `plan` cuts the model as their plan did: other stages have other times."""
        return self.monitored if self.plan is not None and cut(self.plan) == cut(plan) else ()


def still_proposed(proposed: FreezePlan | None, started: FreezePlan) -> FreezePlan | None:
    """`proposed` if it is still to be adopted once the ranks follow `started`, else None."""
    return None if proposed is None or proposed.key <= started.key else proposed


def observation(report: TimelineReport) -> Observation:
    """`report` as the planner reads it; the planner knows nothing of ranks' messages."""
    return Observation(
        step=report.step,
        rank=report.rank,
        step_s=report.step_s,
        spans=tuple((span.action, span.start_s, span.end_s) for span in report.spans),
        energies=report.energies,
    )


def cut(plan: Plan) -> tuple[object, ...]:
    """The fields of `plan` that the times of its actions depend on."""
    return plan.layers, plan.stage_ranks, plan.schedule, plan.chunks, plan.recompute, plan.replicas
