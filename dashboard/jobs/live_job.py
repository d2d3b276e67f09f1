"""A job with a controller: its view, kept up to date by the controller's events, and those events for streams.

The view is folded here from where the controller's own began, so that a service that has just started shows the same
as one that was there all along. Asks the controller for nothing but a view and pages of events.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from dashboard.jobs.frames import KEPT_FRAMES, Frame, Frames
from orchestrator.client.errors import ControllerSilent, JobError, NoController, NoSuchJob
from orchestrator.client.job_client import JobClient
from orchestrator.client.jobs import POLL_S
from orchestrator.history.copying import copied
from orchestrator.history.job_view import JobView

if TYPE_CHECKING:
    from orchestrator.events.types import Record

log = logging.getLogger(__name__)

RETRY_S = 1.0
T = TypeVar("T")


class LiveJob:
    """One job of the cluster."""

    def __init__(self, name: str, client: JobClient) -> None:
        self.name = name
        self.view = JobView(job=name)
        self.frames = Frames()
        self.version = 0
        """Changes whenever the view does."""
        self.trouble = ""
        """Why the view may be old, in words."""
        self.ready = asyncio.Event()
        """Set once there is a view."""
        self.gone = False
        """Whether it has no controller any more: what is shown is how it ended or was lost."""
        self._client = client
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._summary: tuple[int, object] | None = None
        self._copy: tuple[int, JobView] | None = None

    @property
    def ended(self) -> bool:
        """Whether what is shown is how the job ended or was lost."""
        return self.gone or self.view.outcome is not None

    def start(self) -> None:
        """Begin to follow the job."""
        self._task = asyncio.get_running_loop().create_task(self._follow())

    async def close(self) -> None:
        """Follow it no longer."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def snapshot(self) -> JobView:
        """The view as it is now. It stays so: readers in other threads may take their time with it. One copy serves all
        readers between two changes."""
        if self._copy is None or self._copy[0] != self.version:
            self._copy = self.version, copied(self.view)
        return self._copy[1]

    def cached(self, make: Callable[[JobView], T]) -> T:
        """`make(view)`, made again only when the view has changed. For one `make` per job."""
        if self._summary is None or self._summary[0] != self.version:
            self._summary = self.version, make(self.view)
        return self._summary[1]  # pyright: ignore[reportReturnType]

    async def changed(self, version: int, wait_s: float) -> bool:
        """Wait up to `wait_s` until the view is another than that of `version`; return whether it is."""
        if self.version == version and not self.gone:
            waiting = self._changed
            try:
                async with asyncio.timeout(wait_s):
                    await waiting.wait()
            except TimeoutError:
                pass
        return self.version != version

    def _notify(self) -> None:
        self.version += 1
        done, self._changed = self._changed, asyncio.Event()
        done.set()

    async def _follow(self) -> None:
        while not self.gone:
            try:
                await self._follow_one()
            except (NoController, NoSuchJob) as error:
                self.gone = True
                if self.view.outcome is None:
                    self.trouble = f"{error}; --resume goes on from its newest checkpoint"
            except ControllerSilent as error:
                self.trouble = str(error)
            except JobError as error:
                self.trouble = str(error)
                await asyncio.sleep(RETRY_S)
            except Exception:  # the cluster is gone, or a bug: the service must stay
                log.exception("job %s cannot be followed; it is tried again", self.name)
                self.trouble = "the service cannot follow the job: its log says why; it tries again"
                await asyncio.sleep(RETRY_S)
            self._notify()
        self.ready.set()

    async def _follow_one(self) -> None:
        """Follow the job until its events go no further, or must be read from the beginning."""
        view = await self._client.view(self.name)
        total = view.events
        after = max(0, total - KEPT_FRAMES)
        frames = Frames(after)
        while True:
            page = await self._client.page(self.name, after, POLL_S if after >= total else 0.0)
            if (page.missed and after >= total) or page.next < after:
                return  # a newer start, or too slow: begin with a fresh view
            number = page.next - len(page.records)
            if number > frames.newest:
                frames = Frames(number)  # the controller kept fewer
            fresh = [record for n, record in enumerate(page.records, number + 1) if n > total]
            for record in page.records:
                number += 1
                if number > frames.newest:
                    frames.append(frame_of(number, record))
            after = page.next
            for record in fresh:
                view.fold(record)
            if after >= total and (fresh or self.view is not view):
                self.view, self.frames, self.trouble = view, frames, view.trouble
                self._notify()
                self.ready.set()
            if page.over and after >= total:
                self.gone = True
                return


def frame_of(number: int, record: Record) -> Frame:
    """The frame of one event."""
    return Frame(number, record.kind, record.to_json())
