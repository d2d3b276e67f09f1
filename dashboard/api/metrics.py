"""The metrics of all live jobs, for Prometheus."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

from fastapi import APIRouter, Response

from dashboard.service.problems import documented
from dashboard.service.services import Parts
from orchestrator.telemetry.exposition import CONTENT_TYPE, exposition

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
            if not job.gone or job.view.outcome is None:  # running, or lost
                view = await stack.enter_async_context(job.reading())
                views.append(replace(view, trouble=view.trouble or job.trouble))
        text = await asyncio.to_thread(exposition, views)
    return Response(text, media_type=CONTENT_TYPE)
