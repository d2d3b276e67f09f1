"""The metrics of all live jobs, for Prometheus."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import replace

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
    async with AsyncExitStack() as stack:
        views = []
        for job in parts.live.jobs():
            if job.view.outcome is None or time.time() - job.view.ended_s < TOLD_S:
                view = await stack.enter_async_context(job.reading())
                views.append(replace(view, trouble=view.trouble or job.trouble))
        text = await asyncio.to_thread(exposition, views)
    return Response(text, media_type=CONTENT_TYPE)
