"""One step on a page: what each rank did, below it what the simulator predicted, on one time axis, and why ranks were
idle."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.history.job_view import JobView
from orchestrator.pictures.timeline_view import TimelineView
from orchestrator.report.parts import Table
from orchestrator.report.step.step_timeline import measured_step
from planner.profile import Profile


@dataclass(frozen=True)
class TimelinePart:
    """A measured step."""

    heading: str
    emulated: bool
    summary: str
    view: TimelineView
    idle: Table | None
    """Its idle time by cause; None if the step did not follow the plan."""


def timeline(run: JobView, profile: Profile | None = None, step: int | None = None) -> TimelinePart | None:
    """A measured step, above its prediction if there is one; None if no step was measured.

    Args:
        profile: the run's profile; with it, each lane has the rank's memory below it.
        step: one of `run.measured`; None: the newest.

    Raises:
        KeyError: `step` was not measured, or is no longer kept.
    """
    found = measured_step(run, profile, step)
    if found is None:
        return None
    how = "as measured" if found.predicted is None else "measured and predicted"
    return TimelinePart(
        heading=f"Step {found.step:,} {how}",
        emulated=run.emulated,
        summary=f"{found.summary}; {found.memory_text}" if found.memory_text else found.summary,
        view=found.view,
        idle=found.idle,
    )
