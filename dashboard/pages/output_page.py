"""Page of the output of a job's ranks, one rank at a time, newest lines last."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Response
from markupsafe import Markup

from dashboard.api.output import MOST_BYTES, Output, output_of
from dashboard.pages.shown import Job, Run, Shown, ShownJob, page_router
from dashboard.pages.templating import html, rendered
from dashboard.service.access import Caller
from dashboard.service.problems import ProblemAnswer
from dashboard.service.services import From
from orchestrator.client.rank_logs import ranks_with_output

router = page_router()

Rank = Annotated[int | None, Query(ge=0, le=10**6)]
NEWEST_BYTES = 4_096
"""Shown on the job's page."""


def newest_output(shown: Shown) -> Output | None:
    """The end of the first rank's output; None if none is visible here."""
    ranks = ranks_with_output(shown.folder) if shown.folder else ()
    try:
        return output_of(shown.folder, ranks[0], NEWEST_BYTES) if ranks else None
    except ProblemAnswer:  # it was removed meanwhile, or is no file
        return None


def _output(shown: Shown, rank: int | None) -> Output:
    there = ranks_with_output(shown.folder) if shown.folder else ()
    return output_of(shown.folder, min(there, default=0) if rank is None else rank, MOST_BYTES)


async def _page(subject: ShownJob, rank: int | None, caller: Caller) -> Response:
    def made(shown: Shown) -> Markup:
        return rendered("output.html.j2", shown=shown, part=_output(shown, rank), caller=caller)

    return html(await subject.read(made))


async def _text(subject: ShownJob, rank: int | None) -> Response:
    def made(shown: Shown) -> Markup:
        return rendered("output_text.html.j2", part=_output(shown, rank))

    return html(await subject.read(made))


@router.get("/jobs/{job}/output")
async def job_output(job: Job, caller: From, rank: Rank = None) -> Response:
    """The output of a job's rank."""
    return await _page(job, rank, caller)


@router.get("/runs/{run}/output")
async def run_output(run: Run, caller: From, rank: Rank = None) -> Response:
    """The same of a past run."""
    return await _page(run, rank, caller)


@router.get("/jobs/{job}/output/text")
async def job_output_text(job: Job, rank: Rank = None) -> Response:
    """The output alone."""
    return await _text(job, rank)
