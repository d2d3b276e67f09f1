"""All jobs of a cluster, each followed by one task, however many clients look on."""

from __future__ import annotations

import asyncio
import difflib
import logging
from contextlib import suppress

from dashboard.jobs.live_job import LiveJob
from orchestrator.client.errors import ClusterSilent, JobError, NoSuchJob
from orchestrator.client.job_client import JobClient

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Interval at which the cluster is asked for new jobs."""
FIRST_VIEW_S = 10.0
"""Longest wait of a request for the first view of a new job."""
ANSWER_S = 5.0
"""Limit for the cluster's answer to a request, and for that of a controller whose job had ended."""
OTHER_CLUSTER = "WrongClusterID"
"""Ray's error for a driver of the cluster that was at this address before."""
KEPT_ENDED = 20
"""Jobs that are shown after their controllers have gone."""


class LiveJobs:
    """The jobs of the cluster that this process is a driver of.

    Args:
        client: reaches them; None: there is no cluster.
    """

    def __init__(self, client: JobClient | None) -> None:
        self.client = client
        self.trouble = ""
        """Why the list may be old, in words."""
        self._jobs: dict[str, LiveJob] = {}
        self._task: asyncio.Task[None] | None = None
        self._looking = asyncio.Lock()

    def start(self) -> None:
        """Begin to look for jobs."""
        if self.client is not None:
            self._task = asyncio.get_running_loop().create_task(self._keep_looking())

    async def close(self) -> None:
        """Follow no job any longer."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        for job in self._jobs.values():
            await job.close()

    def jobs(self) -> list[LiveJob]:
        """The jobs that are known, by name."""
        return [self._jobs[name] for name in sorted(self._jobs)]

    def known(self, name: str) -> LiveJob | None:
        """The job called `name`, if it is known."""
        return self._jobs.get(name)

    async def look(self) -> None:
        """Look for jobs now: one that has just begun, too, is known then. A cluster that does not answer is asked again
        soon."""
        if self.client is not None:
            with suppress(Exception):
                async with asyncio.timeout(ANSWER_S):
                    await self._look()

    async def find(self, name: str) -> LiveJob:
        """The job called `name`; looks again for one that is not known yet.

        Raises:
            NoSuchJob: there is none.
            ClusterSilent: it is not known, and the cluster does not answer.
        """
        if name not in self._jobs and self.client is not None:
            try:
                async with asyncio.timeout(ANSWER_S):
                    await self._look()
            except TimeoutError:
                raise ClusterSilent(
                    f"no job {name!r} is known, and the cluster has not answered for {ANSWER_S:g} s"
                ) from None
        if (job := self._jobs.get(name)) is None:
            near = difflib.get_close_matches(name, self._jobs, n=1)
            listed = ", ".join(sorted(self._jobs)) or "none"
            hint = f"did you mean {near[0]!r}?" if near else f"running: {listed}"
            raise NoSuchJob(f"there is no job {name!r}; {hint}")
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_VIEW_S):
                await job.ready.wait()
        return job

    async def _keep_looking(self) -> None:
        while True:
            try:
                await self._look()
                self.trouble = ""
            except Exception as error:  # a cluster that is gone for a while must not end the service
                known = isinstance(error, JobError)
                text = str(error) if known else f"the cluster does not answer: {error}"
                if OTHER_CLUSTER in text:
                    text = "another cluster runs at this address now: start the service again to see its jobs"
                if text != self.trouble:
                    log.warning("%s", text)
                self.trouble = text
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        assert self.client is not None
        async with self._looking:
            names = await self.client.jobs()
            known = {name: self._jobs[name] for name in names if name in self._jobs}
            ended = [job for job in known.values() if job.gone]
            again = await asyncio.gather(*(self._began_again(job) for job in ended))
            new = {job.name for job, begun in zip(ended, again, strict=True) if begun}
            for name in names:
                if name not in known or name in new:
                    job = LiveJob(name, self.client)
                    self._jobs[name] = job
                    job.start()
            ended = [job for job in self._jobs.values() if job.gone]
            for job in sorted(ended, key=lambda job: job.view.last_s)[:-KEPT_ENDED]:
                del self._jobs[job.name]

    async def _began_again(self, known: LiveJob) -> bool:
        """Whether a job that had ended has a controller that goes on with it: for a lingering one all is over."""
        assert self.client is not None
        with suppress(JobError, TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                return not (await self.client.page(known.name, known.frames.newest)).over
        return False
