"""A job in a few numbers: what a list of jobs shows. Pure: a view in, values out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.analysis.achieved import (
    best_so_far,
    compute_now,
    epochs_done,
    goals_of,
    time_to_target_s,
    why_ended,
)
from orchestrator.analysis.remaining_time import remaining_time
from orchestrator.analysis.throughput import pace, throughput_unit
from orchestrator.analysis.training_time import training_time_ratio
from orchestrator.history.job_view import JobView
from workers.models.model_config import FAMILIES
from workers.protocol.reports import ValidationReport

SPARKS = 60
"""Most losses in a sparkline."""


@dataclass(frozen=True, kw_only=True)
class JobSummary:
    """A job. Times are in seconds since the Unix epoch; None where there is no such number yet."""

    job: str
    state: str
    """`pending`, `starting`, `training`, `waiting`, `paused`, `finished`, `stopped`, `failed` or `lost`; without a view
    `silent` or `abandoned`, and from a service `submitting` or `refused`."""
    step: int
    """Steps committed."""
    last_step: int
    """The step at which it is done."""
    loss: float | None
    """Loss of the newest step; None also if it is not finite."""
    losses: tuple[float, ...]
    """At most `SPARKS` of the losses so far, evenly spread: always the first one, and the newest one last."""
    step_s: float | None
    """Median seconds of the newest steps, as `orchestrator.analysis.throughput.pace` chooses them."""
    tokens_per_s: float | None
    """Over the same steps; samples per second if the model has no tokens. None while the job is paused or waits."""
    per_s: str
    """`tokens/s` or `samples/s`."""
    samples_per_hour: float | None
    """Over the newest steps of the newest generation; None while the job is paused or waits."""
    flops_per_s: float | None
    """Floating-point operations per second that the model's passes take, over the same steps; None where they cannot be
    counted."""
    mfu: float | None
    """Their share of what the makers publish for the ranks' devices; None where they do not."""
    epochs: float | None
    """Passes over the training samples so far."""
    validation_loss: float | None
    """The newest one; None also if it is not finite."""
    metrics: dict[str, float]
    """Metrics of the newest validation, those that are finite."""
    watched: str
    """The metric that is to get better: of `checkpoint.keep_best`, else of `job.stop_at`, else the loss."""
    best: float | None
    """Its best value in a validation so far."""
    best_step: int | None
    """The step of that validation."""
    time_to_target_s: float | None
    """Duration of the steps that stand up to the first validation that reached `job.stop_at`; None if none did."""
    why: str
    """Reason, in words, why validations ended it: the metric that reached `job.stop_at`, or what did not get better for
    `job.patience`; empty if none did."""
    remaining_s: float | None
    """Until the last step at the pace of the newest steps; None while the job does not train."""
    ranks: int
    """Ranks that train."""
    spares: int
    effective_time_ratio: float | None
    """Time of committed steps that stand over all time since the newest start's first step."""
    recoveries: int
    """Number of regroupings after losses of ranks."""
    recovery_s: float
    """Seconds from signs of loss until the job trained again, summed."""
    steps_rerun: int
    """Interrupted and voided steps that were run again."""
    plan_version: str | None
    """`EPOCH.VERSION` of the newest plan."""
    folder: str
    trouble: str
    """Why what is shown may be old, or the job has no controller; empty if all is well."""
    started_s: float
    ended_s: float | None
    """Time of the last event; None while the job runs."""
    duration_s: float
    """Duration of all starts, without the time between them."""
    model: str
    """In a few words."""


def plan_version(view: JobView) -> str | None:
    """`EPOCH.VERSION` of the job's newest plan."""
    return f"{view.plan.epoch}.{view.plan.version}" if view.plan is not None else None


def job_summary(view: JobView, *, trouble: str = "", lost: bool = False) -> JobSummary:
    """The summary of `view`.

    Args:
        trouble: in addition to the view's own.
        lost: whether it has no controller, though it has not ended.
    """
    steps = [view.steps[step] for step in sorted(view.steps)]
    losses = [report.loss for report in steps if math.isfinite(report.loss)]
    spread = min(SPARKS, len(losses))
    sparks = tuple(losses[n * (len(losses) - 1) // max(1, spread - 1)] for n in range(spread))
    running = view.outcome is None and not lost
    now = pace(view)
    now_used, best, watched = compute_now(view), best_so_far(view), goals_of(view).watched
    newest = view.validations[max(view.validations)] if view.validations else None
    return JobSummary(
        job=view.job,
        state="lost" if lost and view.outcome is None else view.state,
        step=view.step,
        last_step=view.last_step,
        loss=losses[-1] if steps and math.isfinite(steps[-1].loss) else None,
        losses=sparks,
        step_s=now.step_s if now is not None else None,
        tokens_per_s=now.per_s if now is not None else None,
        per_s=throughput_unit(view),
        samples_per_hour=None if now_used is None else now_used.samples_per_hour,
        flops_per_s=None if now_used is None else now_used.flops_per_s,
        mfu=None if now_used is None else now_used.mfu,
        epochs=epochs_done(view),
        validation_loss=newest.loss if newest is not None and math.isfinite(newest.loss) else None,
        metrics=finite_metrics(newest),
        watched=watched,
        best=None if best is None else best.values[watched],
        best_step=None if best is None else best.step,
        time_to_target_s=time_to_target_s(view),
        why=why_ended(view),
        remaining_s=remaining_time(view) if running else None,
        ranks=len(view.ranks.members) if running else 0,
        spares=len(view.ranks.spares) if running else 0,
        effective_time_ratio=training_time_ratio(view),
        recoveries=view.totals.recoveries.get("loss", 0),
        recovery_s=sum(view.totals.recovery_s.get("loss", {}).values()),
        steps_rerun=view.steps_rerun,
        plan_version=plan_version(view),
        folder=view.folder,
        trouble=trouble or view.trouble,
        started_s=view.started_s,
        ended_s=None if running else view.last_s,
        duration_s=view.duration_s,
        model=model_text(view.spec.get("model", {})),
    )


def finite_metrics(validation: ValidationReport | None) -> dict[str, float]:
    """The metrics of a validation that are finite."""
    told = {} if validation is None else validation.metrics
    return {name: value for name, value in told.items() if math.isfinite(value)}


def model_text(model: Mapping[str, Any]) -> str:
    """The model in a few words."""
    if model.get("factory"):
        return str(model["factory"])
    family = str(model.get("family") or "")
    if not family:
        return ""
    own = FAMILIES[family].model_fields if family in FAMILIES else model
    sizes = {"layers": "{} blocks", "width": "width {}", "context": "context {}"}
    texts = (text.format(model[key]) for key, text in sizes.items() if key in model and key in own)
    return ", ".join((family, *texts))


def without_view(job: str, state: str, trouble: str) -> JobSummary:
    """The summary of a job of which no more is known than its state."""
    return job_summary(JobView(job=job, state=state), trouble=trouble)
