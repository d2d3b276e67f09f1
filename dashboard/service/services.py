"""Dependencies of routes and pages: the service's parts, and who sent a request."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from dashboard.jobs.live_jobs import LiveJobs
from dashboard.jobs.past_runs import PastRuns
from dashboard.jobs.submission import PendingSubmission, Submissions
from dashboard.service.access import Access, Caller
from dashboard.service.limits import AtOnce
from dashboard.service.problems import ProblemAnswer
from dashboard.service.settings import ServiceSettings
from dashboard.service.threads import Threads
from orchestrator.client.job_client import JobClient


@dataclass(frozen=True, kw_only=True)
class Services:
    """The parts of one running service."""

    settings: ServiceSettings
    access: Access
    live: LiveJobs
    past: PastRuns
    submissions: Submissions | None
    """None without a cluster."""
    threads: Threads
    streams: AtOnce
    """The open ones."""
    closing: asyncio.Event
    """Set when the service ends: streams end then."""

    def submission(self, job: str) -> PendingSubmission | None:
        """The submission of `job` if it is not decided or was refused. Asked before the job is looked for: one that is
        not found after its submission was accepted is gone."""
        found = self.submissions.find(job) if self.submissions is not None else None
        return found if found is not None and (not found.done or found.error) else None

    @property
    def client(self) -> JobClient:
        """The client of the cluster's jobs.

        Raises:
            ProblemAnswer: there is no cluster.
        """
        if self.live.client is None:
            raise ProblemAnswer(
                409, "this service shows past runs and has no cluster", action="Start it with --address."
            )
        return self.live.client


# Not plain functions: FastAPI runs these in a thread each.
async def _services(request: Request) -> Services:
    return request.app.state.services


async def _caller(request: Request) -> Caller:
    return request.state.caller


Parts = Annotated[Services, Depends(_services)]
From = Annotated[Caller, Depends(_caller)]
