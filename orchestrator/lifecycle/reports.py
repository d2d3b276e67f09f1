"""Applies ranks' reports to the job: each fact once, and steps in order, whichever ranks report them. Pure.

After a failure every rank reports what the first one may not have reported; a controller that takes over
receives again what the previous one did not log.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from orchestrator.history.freeze_history import still_proposed
from orchestrator.history.ranks_view import KEPT_CHECKPOINTS
from orchestrator.lifecycle.states import JobData
from planner.freezing import FreezePlan
from workers.protocol.orders import CheckpointRef
from workers.protocol.reports import (
    ActivationsKept,
    CheckpointReport,
    FreezeStarted,
    PrefixFrozen,
    Report,
    StepReport,
    ValidationReport,
)


def take_report(job: JobData, report: Report) -> tuple[JobData, tuple[Report, ...]]:
    """Return `job` with `report` applied, and the reports that are new, to be logged."""
    if isinstance(report, CheckpointReport) and job.intents.save_after is not None:
        # A checkpoint begun before the request does not answer it; a failed one does.
        after = job.intents.save_after
        job = replace(job, intents=replace(job.intents, save_after=None if report.step > after else after))
    match report:
        case StepReport():
            return _step(job, report)
        case ValidationReport(step=step):
            if step <= job.progress.validated:
                return job, ()
            return replace(job, progress=replace(job.progress, validated=step)), (report,)
        case PrefixFrozen(step=step, layers=layers):
            if step <= job.progress.prefix_told:
                return job, ()
            return replace(job, progress=replace(job.progress, prefix_told=step, frozen=layers)), (report,)
        case ActivationsKept(held_out=False, why_not="") if not job.progress.keeps:
            # Layouts are worth something else now: also the one that was weighed for this prefix, if it is told of yet.
            again = -1 if job.progress.frozen else job.progress.packed_for
            return replace(job, progress=replace(job.progress, keeps=True, packed_for=again)), (report,)
        case CheckpointReport(step=step, path=path, error=None):
            if any(ref.path == path for ref in job.progress.checkpoints):
                return job, ()
            known = (CheckpointRef(path=path, step=step), *job.progress.checkpoints)
            newest = sorted(known, key=lambda ref: ref.step, reverse=True)
            return replace(
                job, progress=replace(job.progress, checkpoints=tuple(newest[:KEPT_CHECKPOINTS]))
            ), (report,)
        case FreezeStarted(plan=plan):
            if plan in job.progress.freeze:
                return job, ()
            return replace(
                job,
                progress=replace(job.progress, freeze=with_freeze(job.progress.freeze, (plan,))),
                intents=replace(job.intents, proposed=still_proposed(job.intents.proposed, plan)),
            ), (report,)
        case _:
            return job, (report,)


def _step(job: JobData, report: StepReport) -> tuple[JobData, tuple[Report, ...]]:
    """A step reported before its predecessor waits for it, but not forever: what was not reported before the
    newest generation trained is lost with the ranks that knew it."""
    known = report.step <= job.progress.step or any(early.step == report.step for early in job.progress.early)
    if known or report.generation < job.progress.since:
        return job, ()
    early = sorted((*job.progress.early, report), key=lambda one: one.step)
    step, news = job.progress.step, []
    if report.generation == job.progress.generation and step < job.progress.began < report.step:
        news = [one for one in early if one.step <= job.progress.began]
        early, step = early[len(news) :], job.progress.began
    while early and early[0].step == step + 1:
        news.append(early.pop(0))
        step += 1
    step_s = news[-1].step_s if news else job.progress.step_s
    progress = replace(job.progress, step=step, step_s=step_s, early=tuple(early))
    return replace(job, progress=progress), tuple(news)


def with_freeze(known: tuple[FreezePlan, ...], more: Iterable[FreezePlan]) -> tuple[FreezePlan, ...]:
    """Return the freeze plans, ordered by the step at which they start."""
    plans = {plan.start or 0: plan for plan in (*known, *more)}
    return tuple(plans[start] for start in sorted(plans))
