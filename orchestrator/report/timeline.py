"""One step in `report.html`: what each rank did, and above it what the simulator foretold, on the same time axis."""

from __future__ import annotations

from orchestrator.history.job_view import JobView
from orchestrator.report.parts import emulated_tag, inline
from orchestrator.report.step_timeline import newest_step
from planner.profile import Profile


def timeline(run: JobView, profile: Profile | None = None) -> str:
    """The newest measured step as a picture, below its prediction where there is one; each rank's memory beneath its
    lane where `profile`, which the run was planned with, tells of it."""
    step = newest_step(run, profile)
    if step is None:
        return ""
    heading = "as measured" if step.predicted is None else "predicted and measured"
    width = max(1000, 6 * max(map(len, step.measured)))
    said = f"{step.summary}; {step.memory_text}" if step.memory_text else step.summary
    return (
        f"<section><h2>Step {step.step:,} {heading}{emulated_tag(run.emulated)}<small>{said}</small></h2>"
        '<div class="card scroll picture" tabindex="0" role="region" aria-label="Timeline of one step">'
        f"{inline(step.svg(width))}</div></section>"
    )
