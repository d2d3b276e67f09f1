"""Where a read route takes its view from: a live job or a past run. Both answer alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Protocol, TypeVar

from fastapi import Depends

from dashboard.api.models import JobName, RunName
from dashboard.jobs.live_job import LiveJob
from dashboard.jobs.past_runs import PastRun, PastRuns
from dashboard.jobs.submission import PendingSubmission
from dashboard.service.services import Parts, Services
from dashboard.service.threads import Threads
from orchestrator.client.errors import ClusterSilent, NoSuchJob
from orchestrator.history.job_view import JobView

T = TypeVar("T")


class JobSource(Protocol):
    """A job to read from."""

    @property
    def name(self) -> str:
        """Name of the job or run in routes and pages."""
        ...

    @property
    def trouble(self) -> str:
        """Why what is shown may be old."""
        ...

    @property
    def lost(self) -> bool:
        """Whether it has no controller, though it may not have ended."""
        ...

    def folder(self, view: JobView) -> str:
        """Where its files are, seen from here; empty if that is not known."""
        ...

    async def read(self, make: Callable[[JobView], T], *, simulates: bool = False) -> T:
        """`make(view)`, computed in another thread.

        Args:
            simulates: whether it takes seconds.
        """
        ...


@dataclass(frozen=True, eq=False)
class LiveSource:
    """A job of the cluster."""

    job: LiveJob
    threads: Threads

    @property
    def name(self) -> str:
        return self.job.name

    @property
    def trouble(self) -> str:
        return self.job.trouble

    @property
    def lost(self) -> bool:
        return self.job.gone

    def folder(self, view: JobView) -> str:
        return view.folder

    async def read(self, make: Callable[[JobView], T], *, simulates: bool = False) -> T:
        run = self.threads.simulate if simulates else self.threads.read
        return await run(partial(make, self.job.snapshot()))


@dataclass(frozen=True, eq=False)
class PastSource:
    """A run's folder."""

    runs: PastRuns
    run: PastRun
    threads: Threads
    trouble = ""
    lost = True

    @property
    def name(self) -> str:
        return self.run.name

    def folder(self, view: JobView) -> str:
        return str(self.run.path)

    async def read(self, make: Callable[[JobView], T], *, simulates: bool = False) -> T:
        view = await self.threads.read_files(partial(self.runs.view, self.run))
        run = self.threads.simulate if simulates else self.threads.read
        return await run(partial(make, view))


async def live_source(job: JobName, parts: Parts) -> LiveSource:
    """The job of the path."""
    return LiveSource(await parts.live.find(job), parts.threads)


async def live_or_submitted(job: str, parts: Services) -> LiveSource | PendingSubmission:
    """The job of the path, or its submission as long as no such job is known, or only an earlier run of it that has
    ended."""
    submission = parts.submission(job)
    try:
        live = await live_source(job, parts)
    except (NoSuchJob, ClusterSilent):
        if submission is None:
            raise
        return submission
    return submission if submission is not None and submission.hides(live.job) else live


async def past_source(run: RunName, parts: Parts) -> PastSource:
    """The run of the path."""
    found = await parts.threads.read_files(partial(parts.past.find, run))
    return PastSource(parts.past, found, parts.threads)


Live = Annotated[LiveSource, Depends(live_source)]
Past = Annotated[PastSource, Depends(past_source)]
