"""The time until a job's last step at its present pace. Pure: step reports in, seconds out."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.history.job_view import JobView
from workers.protocol.reports import StepReport

RECENT_STEPS = 100
"""Newest steps whose pace is taken to go on."""


def remaining_s(newest: Sequence[StepReport], last_step: int) -> float | None:
    """The seconds that the steps after the newest one take until `last_step`; None before the first step.

    Commit to commit, so that validation and what else comes between steps counts. Only the newest generation's pace
    goes on, as another number of ranks takes another time, and its first step warms caches.

    Args:
        newest: the newest steps, oldest first; all but the last `RECENT_STEPS` are left out.
    """
    if not newest:
        return None
    last = newest[-1]
    recent = [report for report in newest[-RECENT_STEPS:] if report.generation == last.generation]
    timed = recent[1:] or recent
    return max(0, last_step - last.step) * sum(report.step_s for report in timed) / len(timed)


def remaining_time(view: JobView) -> float | None:
    """The same of a job; None while it does not train, as no one knows when a paused or waiting job goes on."""
    if view.state != "training" or not view.steps:
        return None
    return remaining_s([view.steps[step] for step in sorted(view.steps)[-RECENT_STEPS:]], view.last_step)
