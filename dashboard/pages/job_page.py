"""The page of a job and of a past run, its sections alone, and the timeline of one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import Path, Query, Response
from markupsafe import Markup

from dashboard.api.models import JobName
from dashboard.api.sources import live_or_submitted
from dashboard.jobs.submission import PendingSubmission
from dashboard.pages.sections import BY_NAME, render, render_first
from dashboard.pages.shown import Job, Run, Shown, ShownJob, page_router
from dashboard.pages.templating import html, page, rendered
from dashboard.service.access import Caller
from dashboard.service.mistakes import NAME
from dashboard.service.problems import ProblemAnswer
from dashboard.service.services import From, Parts
from orchestrator.report.run.decision_log import decision_log
from orchestrator.report.step.timeline import timeline

router = page_router()

Name = Annotated[str, Path(pattern=NAME)]
Step = Annotated[int | None, Query(ge=1, le=2**53)]


async def _whole(subject: ShownJob, caller: Caller) -> Response:
    """The page."""

    def made(shown: Shown) -> Markup:
        return rendered(
            "job.html.j2",
            shown=shown,
            sections=render_first(shown),
            caller=caller,
        )

    return html(await subject.read(made))


async def _part(subject: ShownJob, name: str) -> Response:
    section = BY_NAME.get(name)
    if section is None:
        raise ProblemAnswer(404, f"a job's page has no section {name!r}")
    return html(await subject.read(lambda shown: render(section, shown)))


async def _step(subject: ShownJob, step: int | None, caller: Caller) -> Response:
    def made(shown: Shown) -> Markup:
        steps = sorted(shown.view.measured)
        kept = f"{steps[0]:,} to {steps[-1]:,}" if steps else "none yet"
        if not steps or (step is not None and step not in steps):
            raise ProblemAnswer(
                404,
                "no step was measured yet" if not steps else f"no timeline of step {step:,} is kept",
                action=f"Measured steps that are kept: {kept}.",
            )
        number = steps[-1] if step is None else step
        place = steps.index(number)
        return rendered(
            "step.html.j2",
            shown=shown,
            part=timeline(shown.view, shown.profile(), number),
            number=number,
            steps=steps,
            earlier=steps[place - 1] if place else None,
            later=steps[place + 1] if place + 1 < len(steps) else None,
            caller=caller,
        )

    return html(await subject.read(made))


async def _decisions(subject: ShownJob, caller: Caller) -> Response:
    make: Callable[[Shown], Markup] = lambda shown: rendered(  # noqa: E731
        "decisions.html.j2", shown=shown, entries=decision_log(shown.view), caller=caller
    )
    return html(await subject.read(make))


@router.get("/jobs/{job}")
async def job_page(job: JobName, parts: Parts, caller: From) -> Response:
    """A job of the cluster, or one that is being submitted or was refused."""
    found = await live_or_submitted(job, parts)
    if isinstance(found, PendingSubmission):
        return page("submission.html.j2", submission=found, caller=caller)
    return await _whole(ShownJob(found, f"/jobs/{job}", caller), caller)


@router.get("/runs/{run}")
async def run_page(run: Run, caller: From) -> Response:
    """A past run."""
    return await _whole(run, caller)


@router.get("/jobs/{job}/parts/{name}")
async def job_part(job: Job, name: Name) -> Response:
    """A section of a job's page."""
    return await _part(job, name)


@router.get("/runs/{run}/parts/{name}")
async def run_part(run: Run, name: Name) -> Response:
    """A section of a past run's page."""
    return await _part(run, name)


@router.get("/jobs/{job}/steps")
async def job_step(job: Job, caller: From, step: Step = None) -> Response:
    """The timeline of a measured step of a job."""
    return await _step(job, step, caller)


@router.get("/runs/{run}/steps")
async def run_step(run: Run, caller: From, step: Step = None) -> Response:
    """The timeline of a measured step of a past run."""
    return await _step(run, step, caller)


@router.get("/jobs/{job}/decisions")
async def job_decisions(job: Job, caller: From) -> Response:
    """Every decision about a job, each with its candidates."""
    return await _decisions(job, caller)


@router.get("/runs/{run}/decisions")
async def run_decisions(run: Run, caller: From) -> Response:
    """The same of a past run."""
    return await _decisions(run, caller)
