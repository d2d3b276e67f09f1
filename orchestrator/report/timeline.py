"""One step on a page: what each rank did, below it what the simulator predicted, on one time axis, and why ranks were
idle."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from orchestrator.history.job_view import JobView
from orchestrator.pictures.templating import environment
from orchestrator.pictures.timeline_view import TimelineView
from orchestrator.report.parts import Table
from orchestrator.report.step_timeline import measured_step
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


def timeline_html(run: JobView, profile: Profile | None = None, step: int | None = None) -> Markup | None:
    """The section of `timeline` as HTML, for a page that has `page.css` (static file of `orchestrator.report`),
    `timeline_view.css` and the scripts of `assets.TIMELINE_SCRIPTS` (static files of `orchestrator.pictures`).

    It contains no script to run, no style and no reference. After it is put into a page that is already open,
    `freshetTimelines.drawAll(element)` draws it.

    Raises:
        KeyError: as `timeline`.
    """
    part = timeline(run, profile, step)
    if part is None:
        return None
    packages = ("orchestrator.report", "orchestrator.pictures")
    return Markup(environment(*packages).get_template("timeline.html.j2").render(part=part))
