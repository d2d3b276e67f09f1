"""Training throughput of a job: of one step, and now. Pure: reports in, numbers out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from orchestrator.history.job_view import JobView
from workers.protocol.reports import StepReport

RECENT_STEPS = 20
"""Newest steps whose time and throughput are told."""
IDLE = ("paused", "waiting")
"""States in which a job has no ranks that train, and so no throughput."""


@dataclass(frozen=True, kw_only=True)
class NewestPace:
    """Time and throughput of the newest steps."""

    step_s: float
    """Their median."""
    per_s: float | None
    """Tokens per second, or samples per second if there are no tokens; None if they took no time, and while the job is
    paused or waits."""


def recent_steps(view: JobView) -> list[StepReport]:
    """The newest `RECENT_STEPS` steps, as far as they are of the newest generation: another number of ranks takes
    another time."""
    newest = [view.steps[step] for step in sorted(view.steps)[-RECENT_STEPS:]]
    return [report for report in newest if report.generation == newest[-1].generation]


def pace(view: JobView) -> NewestPace | None:
    """The pace of the newest steps; None before the first."""
    recent = recent_steps(view)
    if not recent:
        return None
    per_s = None if view.state in IDLE else mean_throughput(recent)
    return NewestPace(step_s=median(report.step_s for report in recent), per_s=per_s)


def throughput(report: StepReport) -> float:
    """Tokens per second of a step, or samples per second if there are no tokens; NaN if it took no time."""
    found = mean_throughput([report])
    return math.nan if found is None else found


def mean_throughput(reports: Sequence[StepReport]) -> float | None:
    """The same over several steps; None if they took no time."""
    seconds = sum(report.step_s for report in reports)
    return sum(report.tokens or report.samples for report in reports) / seconds if seconds > 0 else None


def throughput_unit(view: JobView) -> str:
    """`tokens/s`, or `samples/s` if the job's steps have no tokens."""
    return "tokens/s" if any(report.tokens for report in view.steps.values()) else "samples/s"
