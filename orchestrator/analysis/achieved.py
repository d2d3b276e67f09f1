"""Achievements of a job by the measures of papers: passes over the data, samples per hour, FLOP/s, the best
validation, the time to the target. Pure: a job's view in, numbers out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.analysis.throughput import IDLE, recent_steps
from orchestrator.history.job_view import JobView
from planner.accelerators import ACCELERATORS, REPORTED
from workers.protocol.goals import Goals, PastValidation, best_validation
from workers.protocol.reports import StepReport

HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Use of the devices over some steps."""

    samples_per_hour: float
    flops_per_s: float | None
    """Floating-point operations per second that the model's passes take; None: unknown, or modelled."""
    mfu: float | None
    """Their share of what the makers publish for the ranks' devices (model FLOPs utilization); None: not published."""


def compute_now(view: JobView) -> Compute | None:
    """Use of the devices over the newest steps; None without any, and while the job is paused or waits."""
    return None if view.state in IDLE else compute(view, recent_steps(view))


def compute(view: JobView, steps: Sequence[StepReport]) -> Compute | None:
    """Use of the devices over `steps`; None where they took no time."""
    seconds = sum(report.step_s for report in steps)
    if seconds <= 0:
        return None
    samples_per_s = sum(report.samples for report in steps) / seconds
    counted = None if view.emulated else view.flops_per_sample
    flops_per_s = None if counted is None else samples_per_s * counted
    peak = _peak_flops(view)
    return Compute(
        samples_per_hour=HOUR_S * samples_per_s,
        flops_per_s=flops_per_s,
        mfu=flops_per_s / peak if flops_per_s is not None and peak is not None else None,
    )


def epochs_done(view: JobView) -> float | None:
    """Passes over the training samples so far; None where their number is unknown, and before the first step."""
    if not view.train_samples or not view.steps:
        return None
    course = view.course
    if course is None:
        return view.step * view.steps[max(view.steps)].samples / view.train_samples
    return course.taken(view.step) / view.train_samples


def goals_of(view: JobView) -> Goals:
    """The goals that validations of the job decide."""
    job = view.spec.get("job", {})
    return Goals.of(
        stop_at=job.get("stop_at"),
        patience=job.get("patience"),
        keep_best=view.spec.get("checkpoint", {}).get("keep_best"),
    )


def best_so_far(view: JobView) -> PastValidation | None:
    """The validation with the best value of the metric that the job watches; None without any."""
    return best_validation(_validations(view), goals_of(view).watched)


def time_to_target_s(view: JobView) -> float | None:
    """Seconds of the steps that stand up to the first validation that reached `job.stop_at`; None if none did."""
    goals, past = goals_of(view), _validations(view)
    step = next((each.step for each in past if goals.reached((each,), each.step)), None)
    if step is None:
        return None
    stand = (each for each in view.recovery.commits if each.voided_by is None)
    return sum(each.step_s for each in stand if each.step <= step)


def why_ended(view: JobView) -> str:
    """Reason, in words, why validations ended the job; empty if none did."""
    return getattr(view.outcome, "why", "")


def _validations(view: JobView) -> list[PastValidation]:
    return [
        PastValidation(step=step, values={"loss": report.loss, **report.metrics})
        for step, report in sorted(view.validations.items())
    ]


def _peak_flops(view: JobView) -> float | None:
    """Published FLOP/s of the ranks' devices together, in the job's precision; None where one is not known."""
    share = min(1.0, (view.spec.get("cluster", {}).get("resources_per_rank") or {}).get("GPU", 1.0))
    precision = view.spec.get("job", {}).get("precision", "float32")
    names = [view.ranks.machines.get(rank, "").partition(", PyTorch")[0] for rank in view.ranks.members]
    if not names or not all(name in REPORTED for name in names):
        return None
    # Ranks that share a device share its peak.
    return sum(share * ACCELERATORS[REPORTED[name]].peak_flops(precision) for name in names)
