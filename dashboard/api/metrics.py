"""The metrics of all live jobs, for Prometheus."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

from fastapi import APIRouter, Response

from dashboard.api.examples import METRICS, answered
from dashboard.jobs.live_job import LiveJob
from dashboard.service.problems import documented
from dashboard.service.services import Parts
from orchestrator.history.job_view import JobView
from orchestrator.telemetry.exposition import CONTENT_TYPE, exposition

TOLD_S = 1_800.0
"""Time for which the metrics of an ended job are exported: longer than any rule looks back."""

router = APIRouter(tags=["metrics"])


@router.get(
    "/metrics",
    response_class=Response,
    responses=documented(401, 403) | answered(METRICS, "Prometheus's text format.", "text/plain"),
)
async def metrics(parts: Parts) -> Response:
    """The metrics of all live jobs, in Prometheus's text format. The read token is enough."""
    told_since_s = time.time() - TOLD_S
    jobs = parts.live.jobs()
    # A snapshot copies all that is kept of a job: none is taken of those that are left out.
    views = [_view(job) for job in jobs if job.view.outcome is None or job.view.last_s > told_since_s]
    return Response(await parts.threads.read(partial(exposition, views)), media_type=CONTENT_TYPE)


def _view(job: LiveJob) -> JobView:
    view = job.snapshot()
    return replace(view, trouble=view.trouble or job.trouble)
