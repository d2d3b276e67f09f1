"""Events of a job: in pages, and as a live stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from itertools import accumulate
from typing import Annotated

from fastapi import APIRouter, Header, Query, Response
from fastapi.responses import StreamingResponse

from dashboard.api.examples import EVENTS, STREAM, answered, example
from dashboard.api.models import JsonObject, StrictModel
from dashboard.api.sources import Live
from dashboard.api.streams import BEAT, BEAT_S, BEGIN, LONGEST_S, BoundedStream
from dashboard.jobs.frames import Slice
from dashboard.jobs.live_job import LiveJob
from dashboard.service.problems import ProblemAnswer, documented
from dashboard.service.services import From, Parts
from orchestrator.client.errors import NoController
from orchestrator.events.types import KINDS, kind_called

router = APIRouter(tags=["events"], prefix="/jobs/{job}")

_ID = re.compile(r"(?P<run>[0-9]{1,15})-(?P<number>[0-9]{1,15})", re.ASCII)
PAGE = 1_000
TURN_S = 0.2
"""A stream sends at most this often; what came in between goes together."""
MOST_SENT = 2**16
"""Most characters of events in one sending, if there are several."""
MOST_AT_ONCE = 500
"""Most events in one sending: a client that cannot keep up is told what it missed, and nothing is kept for it."""


class EventPage(StrictModel, json_schema_extra=example(EVENTS)):
    """Events, oldest first."""

    events: list[JsonObject]
    """Lines of the job's log."""
    missed: int
    """Events after `after` that are no longer kept here: the log has them."""
    next: int
    """Value of `after` for the next request. Less than this request's `after`: there are fewer events; the job may have
    started again, which numbers its events from 1."""
    over: bool
    """Whether the job has ended and this was all."""


Kinds = Annotated[
    list[str] | None,
    Query(alias="kind", max_length=100, description="A kind of event, such as `Issued`; once for each."),
]


def checked_kinds(kinds: Sequence[str] | None) -> tuple[str, ...]:
    """The kinds of events that someone chose.

    Raises:
        ProblemAnswer: there is no such kind.
    """
    chosen: dict[str, None] = {}
    for name in kinds or ():
        if (kind := kind_called(name)) is None:
            raise ProblemAnswer(
                422, f"there is no kind of event {name[:60]!r}", action=f"Kinds: {', '.join(KINDS)}."
            )
        chosen[kind] = None
    return tuple(chosen)


@router.get("/events", responses=documented(401, 403, 404, 409, 422, 503))
async def events(
    live: Live,
    after: Annotated[int, Query(ge=0, le=2**53, description="Number of the last event already read.")] = 0,
    limit: Annotated[int, Query(ge=1, le=PAGE, description="Most events to answer.")] = PAGE,
    wait_s: Annotated[float, Query(ge=0, le=60, description="How long to wait for one.")] = 0.0,
    kinds: Kinds = None,
) -> EventPage:
    """The job's events after the first `after`, since its newest start; with `kind`, those of some kinds alone. Then
    there may be none though others have happened: ask after `next` again."""
    job, chosen = live.job, checked_kinds(kinds)
    found = job.frames.after(after, limit, chosen)
    if not found.frames and wait_s > 0 and not job.gone:
        await job.changed(job.version, wait_s)
        found = job.frames.after(after, limit, chosen)
    at_end = job.gone and found.next >= job.frames.newest
    if at_end and not found.frames and job.view.outcome is None:
        raise NoController(job.trouble or f"the controller of job {job.name!r} is gone")
    return EventPage(
        events=[json.loads(frame.line) for frame in found.frames],
        missed=found.missed,
        next=found.next,
        over=at_end and job.view.outcome is not None,
    )


@router.get(
    "/stream",
    response_class=StreamingResponse,
    responses=documented(401, 403, 404, 422, 429, 503)
    | answered(STREAM, "Server-sent events.", "text/event-stream"),
)
async def stream(
    live: Live,
    parts: Parts,
    caller: From,
    last: Annotated[
        str | None,
        Header(alias="Last-Event-ID", description="As the browser sends it: go on after that event."),
    ] = None,
    after: Annotated[
        int | None, Query(ge=0, le=2**53, description="Go on after this event; unset: only new ones.")
    ] = None,
) -> Response:
    """The job's events as they happen: `record` with a line of the log, `missed` with a number of events that are no
    longer kept, `start` when the job starts again, `end` when it is over. Reconnect with Last-Event-ID."""
    job = live.job
    lines = _lines(job, parts.closing, min(_start(job, last, after), job.frames.newest))
    return BoundedStream(lines, parts.streams, caller)


def _start(job: LiveJob, last: str | None, after: int | None) -> int:
    """The number of the event to go on after. Of another start of the job, all events are new.

    Raises:
        ProblemAnswer: there are no such ids.
    """
    if last:
        if (found := _ID.fullmatch(last)) is None:
            raise ProblemAnswer(
                422,
                f"Last-Event-ID {last[:40]!r} is no id of this stream",
                action="Send an id as the stream sent it, RUN-NUMBER, or none.",
            )
        return int(found["number"]) if int(found["run"]) == job.view.runs else 0
    return after if after is not None else job.frames.newest


async def _lines(job: LiveJob, closing: asyncio.Event, after: int) -> AsyncIterator[str]:
    loop = asyncio.get_running_loop()
    end_s, runs = loop.time() + LONGEST_S, job.view.runs
    yield BEGIN
    beat_s = 0.0
    while not closing.is_set() and loop.time() < end_s:
        if job.view.runs != runs:
            runs, after = job.view.runs, 0
            yield "event: start\ndata: {}\n\n"
        after = min(after, job.frames.newest)  # a controller that took over may have lost the newest ones
        version = job.version
        found = _bounded(job.frames.after(after, MOST_AT_ONCE))
        if found.frames or found.missed:
            yield _text(found, runs)
            beat_s, after = 0.0, found.next
        elif beat_s >= BEAT_S:
            beat_s = 0.0
            yield BEAT
        if after >= job.frames.newest:
            if job.gone:
                yield "event: end\ndata: {}\n\n"
                return
            await job.changed(version, 1.0)
        await asyncio.sleep(TURN_S if after >= job.frames.newest else 0.0)
        beat_s += 1.0 if not found.frames else 0.0


def _bounded(found: Slice) -> Slice:
    """The first events of `found`: one, and as many more as `MOST_SENT` characters hold."""
    sizes = accumulate(len(frame.line) for frame in found.frames)
    count = max(1, sum(size <= MOST_SENT for size in sizes))
    left_out = len(found.frames) - count
    return Slice(found.frames[:count], found.missed, found.next - left_out) if left_out > 0 else found


def _text(found: Slice, runs: int) -> str:
    parts = [f"event: missed\ndata: {json.dumps({'count': found.missed})}\n\n"] if found.missed else []
    parts += [f"id: {runs}-{frame.number}\nevent: record\ndata: {frame.line}\n\n" for frame in found.frames]
    return "".join(parts)
