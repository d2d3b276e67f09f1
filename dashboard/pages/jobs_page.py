"""The start page: all jobs."""

from __future__ import annotations

from fastapi import APIRouter, Response

from dashboard.api.jobs import all_jobs
from dashboard.pages.templating import page
from dashboard.service.services import From, Parts

router = APIRouter(include_in_schema=False)


@router.get("/")
async def jobs(parts: Parts, caller: From) -> Response:
    """All jobs, each in a line."""
    return page("jobs.html.j2", jobs=all_jobs(parts), trouble=parts.live.trouble, caller=caller)
