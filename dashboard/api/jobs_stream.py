"""All jobs as a live stream: the summary of each, sent again whenever it has changed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

from fastapi import APIRouter, Response
from fastapi.responses import StreamingResponse

from dashboard.api.examples import JOBS_STREAM, answered
from dashboard.api.jobs import all_jobs
from dashboard.api.models import Summary
from dashboard.api.streams import BEAT, BEAT_S, BEGIN, LONGEST_S, BoundedStream
from dashboard.service.problems import documented
from dashboard.service.services import From, Parts, Services

router = APIRouter(tags=["jobs"])

TURN_S = 0.5
"""All streams look for changes at the same moments, this far apart: a summary is made once for all of them."""


@router.get(
    "/stream",
    response_class=StreamingResponse,
    responses=documented(401, 403, 429, 503)
    | answered(JOBS_STREAM, "Server-sent events.", "text/event-stream"),
)
async def jobs_stream(parts: Parts, caller: From) -> Response:
    """All jobs as they change: `summary` with a job in a few numbers, first of every job, then whenever it is another
    one; `gone` with the name of a job that is shown no longer; `trouble` with why all this may be old, empty when all
    is well again."""
    return BoundedStream(_lines(parts), parts.streams, caller)


async def _lines(parts: Services) -> AsyncIterator[str]:
    yield BEGIN
    loop = asyncio.get_running_loop()
    end_s, spoke_s = loop.time() + LONGEST_S, loop.time()
    known: dict[str, Summary] = {}
    trouble = ""
    while not parts.closing.is_set() and loop.time() < end_s:
        found = {each.job: each for each in all_jobs(parts)}
        text = _changes(known, found)
        if parts.live.trouble != trouble:
            text += _event("trouble", json.dumps({"trouble": parts.live.trouble}))
        known, trouble = found, parts.live.trouble
        if text or loop.time() >= spoke_s + BEAT_S:
            yield text or BEAT
            spoke_s = loop.time()
        await asyncio.sleep(TURN_S - loop.time() % TURN_S)


def _changes(known: dict[str, Summary], found: dict[str, Summary]) -> str:
    changed = [
        each for name, each in found.items() if known.get(name) is not each and known.get(name) != each
    ]
    gone = [name for name in known if name not in found]
    return "".join(
        [_event("summary", each.model_dump_json()) for each in changed]
        + [_event("gone", json.dumps({"job": name})) for name in gone]
    )


def _event(kind: str, data: str) -> str:
    return f"event: {kind}\ndata: {data}\n\n"
