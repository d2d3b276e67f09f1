"""The metrics of all live jobs, for Prometheus."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

from fastapi import APIRouter, Response

from dashboard.service.problems import documented
from dashboard.service.services import Parts
from orchestrator.telemetry.exposition import CONTENT_TYPE, exposition

TOLD_S = 1_800.0
"""How long an ended job is told of: longer than any rule looks back."""

router = APIRouter(tags=["metrics"])


@router.get(
    "/metrics",
    response_class=Response,
    responses=documented(401, 403)
    | {200: {"content": {"text/plain": {}}, "description": "Prometheus's text format."}},
)
async def metrics(parts: Parts) -> Response:
    """The metrics of all live jobs, in Prometheus's text format. The read token is enough."""
    views = [
        replace(view, trouble=view.trouble or job.trouble)
        for job in parts.live.jobs()
        if (view := job.snapshot()).outcome is None or time.time() - view.ended_s < TOLD_S
    ]
    return Response(await parts.threads.read(partial(exposition, views)), media_type=CONTENT_TYPE)
