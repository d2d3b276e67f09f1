"""What reports tell of the job: each thing once, and steps in their order, whoever tells of them and however often.

After a loss every rank tells what the first one may not have told any more; a controller that takes over is told again
what the one before it did not take in. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from orchestrator.lifecycle.states import Roster
from planner.freezing import FreezePlan
from workers.protocol import (
    CheckpointRef,
    CheckpointReport,
    FreezeStarted,
    Report,
    StepReport,
    ValidationReport,
)

KEPT_CHECKPOINTS = 8
"""How many of the newest checkpoints are remembered; older ones are long deleted."""


def heard(roster: Roster, report: Report) -> tuple[Roster, tuple[Report, ...]]:
    """`roster` with what `report` says, and what of it is news: to be logged."""
    if isinstance(report, CheckpointReport) and roster.save_after is not None:
        # One that was begun before the request does not answer it; one that failed does.
        after = roster.save_after
        roster = replace(roster, save_after=None if report.step > after else after)
    match report:
        case StepReport():
            return _step(roster, report)
        case ValidationReport(step=step):
            if step <= roster.validated:
                return roster, ()
            return replace(roster, validated=step), (report,)
        case CheckpointReport(step=step, path=path, error=None):
            if any(ref.path == path for ref in roster.checkpoints):
                return roster, ()
            known = (CheckpointRef(path=path, step=step), *roster.checkpoints)
            newest = sorted(known, key=lambda ref: ref.step, reverse=True)
            return replace(roster, checkpoints=tuple(newest[:KEPT_CHECKPOINTS])), (report,)
        case FreezeStarted(plan=plan):
            if plan in roster.freeze:
                return roster, ()
            return replace(roster, freeze=with_freeze(roster.freeze, (plan,)), proposed=None), (report,)
        case _:
            return roster, (report,)


def _step(roster: Roster, report: StepReport) -> tuple[Roster, tuple[Report, ...]]:
    """A step that comes before the one that it follows on waits for it. It does not wait for ever: what nobody told
    before the newest generation trained went with who knew it."""
    known = report.step <= roster.step or any(early.step == report.step for early in roster.early)
    if known or report.generation < roster.since:
        return roster, ()
    early = sorted((*roster.early, report), key=lambda one: one.step)
    step, news = roster.step, []
    if report.generation == roster.generation and step < roster.began < report.step:
        news = [one for one in early if one.step <= roster.began]
        early, step = early[len(news) :], roster.began
    while early and early[0].step == step + 1:
        news.append(early.pop(0))
        step += 1
    return replace(roster, step=step, early=tuple(early)), tuple(news)


def with_freeze(known: tuple[FreezePlan, ...], more: Iterable[FreezePlan]) -> tuple[FreezePlan, ...]:
    """Freeze plans by the step they start at."""
    plans = {plan.start or 0: plan for plan in (*known, *more)}
    return tuple(plans[start] for start in sorted(plans))
