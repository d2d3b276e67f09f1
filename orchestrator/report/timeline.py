"""One step in `report.html`: what each rank did, and above it what the simulator predicted, on the same time
axis."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from orchestrator.history.job_view import JobView
from orchestrator.report.step_timeline import newest_step
from planner.profile import Profile


@dataclass(frozen=True)
class TimelinePart:
    """The newest measured step."""

    heading: str
    emulated: bool
    summary: str
    picture: Markup


def timeline(run: JobView, profile: Profile | None = None) -> TimelinePart | None:
    """The newest measured step, below its prediction if there is one; None if no step was measured.

    Args:
        profile: the run's profile; with it, each lane has the rank's memory below it.
    """
    step = newest_step(run, profile)
    if step is None:
        return None
    how = "as measured" if step.predicted is None else "predicted and measured"
    width = max(1000, 6 * max(map(len, step.measured)))
    return TimelinePart(
        heading=f"Step {step.step:,} {how}",
        emulated=run.emulated,
        summary=f"{step.summary}; {step.memory_text}" if step.memory_text else step.summary,
        picture=Markup(step.picture(width).svg(inline=True)),
    )
