"""The job or past run that a page shows, and pages for errors."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

from fastapi import APIRouter, Depends, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from dashboard.api.history import profile_in
from dashboard.api.models import JobName, RunName
from dashboard.api.sources import JobSource, LiveSource, live_source, past_source
from dashboard.pages.templating import html, rendered
from dashboard.service.access import Caller, Role
from dashboard.service.mistakes import mistakes
from dashboard.service.problems import ACTIONS, TITLES, ProblemAnswer, problem_of
from dashboard.service.services import From, Parts
from orchestrator.client.errors import JobError
from orchestrator.history.job_view import JobView
from planner.profile import Profile

_LISTED = "The start page lists the jobs, and Past runs those that have ended."
ADVICE = {404: _LISTED, 405: _LISTED}
"""Status -> what to do, for someone with a browser, where the general advice is for programs."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Shown:
    """The job or run that the sections of a page show."""

    view: JobView
    name: str
    """Name of the job or run in pages."""
    base: str
    """Path of the job's or the run's page."""
    live: bool
    """Whether it is a job of the cluster that has not ended."""
    lost: bool
    """Whether it has no controller, though it may not have ended."""
    trouble: str
    """Why what is shown may be old."""
    folder: str
    """Empty if it is not known."""
    steers: bool = False
    """Whether who looks may change it: the job is live, and the token is for control."""

    def profile(self) -> Profile | None:
        """The profile in its folder, if there is one that is visible here. Reads a file."""
        return profile_in(self.folder)

    @property
    def api(self) -> str:
        """Path of the job or run in the REST interface."""
        return f"/api/v1{self.base}"


@dataclass(frozen=True, eq=False)
class ShownJob:
    """A job or a past run, named by a path, as `caller` sees it."""

    source: JobSource
    base: str
    caller: Caller

    async def read(self, make: Callable[[Shown], T], *, simulates: bool = False) -> T:
        """`make` of what is known now, in another thread.

        Args:
            simulates: whether it takes seconds.
        """
        source = self.source

        def shown(view: JobView) -> T:
            live = isinstance(source, LiveSource) and not source.lost and view.outcome is None
            return make(
                Shown(
                    view=view,
                    name=source.name,
                    base=self.base,
                    live=live,
                    lost=source.lost,
                    trouble=source.trouble,
                    folder=source.folder(view),
                    steers=live and self.caller.role == Role.CONTROL,
                )
            )

        return await source.read(shown, simulates=simulates)


async def job_subject(job: JobName, parts: Parts, caller: From) -> ShownJob:
    """The job called `job`.

    Raises:
        NoSuchJob: there is none.
    """
    return ShownJob(await live_source(job, parts), f"/jobs/{job}", caller)


async def _run(run: RunName, parts: Parts, caller: From) -> ShownJob:
    return ShownJob(await past_source(run, parts), f"/runs/{quote(run, safe='')}", caller)


Job = Annotated[ShownJob, Depends(job_subject)]
Run = Annotated[ShownJob, Depends(_run)]


class PageRoute(APIRoute):
    """A route whose errors are pages."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                return await handle(request)
            except ProblemAnswer as problem:
                return error_page(request, problem)
            except JobError as error:
                return error_page(request, problem_of(error))
            except RequestValidationError as error:
                return error_page(request, ProblemAnswer(422, mistakes(error.errors())))

        return handled


def error_page(request: Request, problem: ProblemAnswer) -> Response:
    """The page of an error."""
    request.state.why = problem.detail
    general = problem.action == ACTIONS.get(problem.status)
    text = rendered(
        "error.html.j2",
        title=TITLES.get(problem.status, "Error"),
        problem=problem,
        action=ADVICE.get(problem.status, problem.action) if general else problem.action,
        caller=getattr(request.state, "caller", None),
    )
    return html(text, problem.status, problem.headers)


def page_router() -> APIRouter:
    """A router of pages."""
    return APIRouter(include_in_schema=False, route_class=PageRoute)
