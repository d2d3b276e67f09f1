"""The newest events of a job or past run, by kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

from fastapi import Response
from markupsafe import Markup

from dashboard.api.events import Kinds, checked_kinds
from dashboard.api.sources import LiveSource
from dashboard.pages.shown import Job, Run, Shown, ShownJob, page_router
from dashboard.pages.templating import html, rendered
from dashboard.service.access import Caller
from dashboard.service.services import From
from orchestrator.events.file_end import file_end
from orchestrator.events.listing import FLOODS, Listing, listing
from orchestrator.events.types import sentence_of
from orchestrator.history.folder import JobFolder

router = page_router()

MOST_BYTES = 2**22
"""Read of the end of a past run's log."""


@dataclass(frozen=True)
class EventLine:
    """An event on the page."""

    time_s: float
    kind: str
    text: str


@dataclass(frozen=True)
class EventsPart:
    """The events that are shown."""

    found: Listing
    lines: tuple[EventLine, ...]
    cut: bool
    """Whether there are older events, which are not counted."""

    @property
    def left_out(self) -> str:
        """The floods that are not listed, with their counts, in words; empty if there are none."""
        counts, kinds = self.found.counts, self.found.kinds
        return ", ".join(f"{counts[kind]:,} of {kind}" for kind in counts if kind in FLOODS - kinds)


async def _part(subject: ShownJob, kinds: Sequence[str]) -> EventsPart:
    source = subject.source
    frames = source.job.frames.after(0, source.job.frames.newest) if isinstance(source, LiveSource) else None

    def made(shown: Shown) -> EventsPart:
        if frames is not None:
            lines, cut = [frame.line for frame in frames.frames], frames.missed > 0
        else:
            lines, cut = _end_of_log(shown.folder)
        found = listing(lines, kinds)
        told = [EventLine(each.time_s, each.kind, sentence_of(each.event)) for each in found.records]
        return EventsPart(found, tuple(told), cut)

    return await subject.read(made)


def _end_of_log(folder: str) -> tuple[list[str], bool]:
    path = JobFolder(folder).events_path if folder else Path("/nowhere")
    end = file_end(path.parent, path.name, MOST_BYTES)
    return (end.content.decode(errors="replace").splitlines(), end.cut) if end is not None else ([], False)


async def _page(subject: ShownJob, kinds: Sequence[str] | None, caller: Caller) -> Response:
    chosen = checked_kinds(kinds)
    part = await _part(subject, chosen)

    def made(shown: Shown) -> Markup:
        query = urlencode([("kind", kind) for kind in chosen])
        return rendered("events.html.j2", shown=shown, part=part, chosen=chosen, query=query, caller=caller)

    return html(await subject.read(made))


async def _list(subject: ShownJob, kinds: Sequence[str] | None) -> Response:
    return html(rendered("events_list.html.j2", part=await _part(subject, checked_kinds(kinds))))


@router.get("/jobs/{job}/events")
async def job_events(job: Job, caller: From, kinds: Kinds = None) -> Response:
    """The newest events of a job, of all kinds that are no flood, or of some."""
    return await _page(job, kinds, caller)


@router.get("/runs/{run}/events")
async def run_events(run: Run, caller: From, kinds: Kinds = None) -> Response:
    """The same of a past run."""
    return await _page(run, kinds, caller)


@router.get("/jobs/{job}/events/list")
async def job_events_list(job: Job, kinds: Kinds = None) -> Response:
    """The events alone."""
    return await _list(job, kinds)
