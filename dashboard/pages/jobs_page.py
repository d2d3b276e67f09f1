"""The start page: all jobs, each in a card. The page's script fetches the cards alone when the stream of summaries says
that they have changed."""

from __future__ import annotations

from typing import Any

from fastapi import Response

from dashboard.api.jobs import all_jobs
from dashboard.pages.head import tone_of
from dashboard.pages.shown import page_router
from dashboard.pages.sparkline import sparkline
from dashboard.pages.templating import page
from dashboard.service.services import From, Parts, Services

router = page_router()


@router.get("/")
async def jobs(parts: Parts, caller: From) -> Response:
    """All jobs."""
    return page("jobs.html.j2", caller=caller, **_facts(parts))


@router.get("/parts/jobs")
async def cards(parts: Parts) -> Response:
    """The jobs alone."""
    return page("section_jobs.html.j2", **_facts(parts))


def _facts(parts: Services) -> dict[str, Any]:
    found = all_jobs(parts)
    return {
        "jobs": [(job, tone_of(job.state), sparkline(job.losses)) for job in found],
        "trouble": parts.live.trouble,
        "cluster": parts.settings.address,
    }
