"""What a job's event log says of freezing: what a resumed or a replayed run must be told of it.

A decision stands from the step it was logged for on, also if that step is run again. Pure: records in, values out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.events.types import Formed, FreezeSolved, Issued, Record, Submitted
from planner.freeze.monitoring import Observation
from planner.freezing import FreezePlan
from planner.plan import Plan
from workers.protocol import FreezeStarted, TimelineReport


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
    """Nothing is decided anew: the run follows `plans` and no others."""

    def monitored_with(self, plan: Plan) -> tuple[TimelineReport, ...]:
        """What was measured, if `plan` cuts the model as it was cut then: other stages have other times."""
        return self.monitored if self.plan is not None and cut(self.plan) == cut(plan) else ()


def freeze_history_of(records: Iterable[Record]) -> FreezeHistory:
    """The history that a log, oldest first, tells."""
    plans: dict[int, FreezePlan] = {}
    monitored: dict[tuple[int, int], TimelineReport] = {}
    solved: FreezeSolved | None = None
    newest: Plan | None = None
    for event in (record.event for record in records):
        match event:
            case Submitted(resume=False, takeover=False):
                plans, monitored, solved = {}, {}, None
            case Issued(plan=plan):
                if newest is not None and cut(newest) != cut(plan):
                    monitored = {}
                newest = plan
            case Formed():
                done = began_at(event)
                monitored = {key: report for key, report in monitored.items() if report.step <= done}
            case TimelineReport(step=step, rank=rank):
                monitored[step, rank] = event
            case FreezeSolved():
                solved = event
            case FreezeStarted(plan=plan):
                assert plan.start is not None, "a plan that ranks took up has a start"
                plans[plan.start] = plan
            case _:
                pass
    return FreezeHistory(
        plans=tuple(plans[start] for start in sorted(plans)),
        monitored=tuple(monitored.values()),
        plan=newest,
        solved=solved,
    )


def began_at(formed: Formed) -> int:
    """Steps committed where the generation began."""
    if formed.step is not None:
        return formed.step
    return formed.start.step if formed.start is not None else 0


def observation(report: TimelineReport) -> Observation:
    """`report` as the planner reads it, which knows nothing of ranks' messages."""
    return Observation(
        step=report.step,
        rank=report.rank,
        step_s=report.step_s,
        spans=tuple((span.action, span.start_s, span.end_s) for span in report.spans),
    )


def freeze_plans_of(records: Iterable[Record]) -> tuple[FreezePlan, ...]:
    """The decisions in a log, by the step they start at: what `--replay` follows."""
    return freeze_history_of(records).plans


def cut(plan: Plan) -> tuple[object, ...]:
    """What of `plan` the times of its actions depend on."""
    return plan.layers, plan.stage_ranks, plan.schedule, plan.chunks, plan.recompute, plan.replicas
