"""`JobClient`: the interface to the jobs of a cluster. It submits jobs, shows them, reads their events and sends
commands.

All code outside a job's own processes uses it, or `BlockingJobClient`. The process is a driver of the cluster: see
`joined`. No call blocks the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.analysis.job_summary import JobSummary, job_summary, without_view
from orchestrator.analysis.step_memory import profile_beside
from orchestrator.client.asking import ask, controller_of, job_names, known_controller, listed
from orchestrator.client.cluster_state import NodeState, cluster_nodes
from orchestrator.client.errors import ControllerSilent, NoController, NoSuchJob, Refused
from orchestrator.client.jobs import Command, Jobs, command_id
from orchestrator.client.ray_calls import RayCalls
from orchestrator.cluster.actor_names import living_jobs
from orchestrator.commands.command import JobCommand
from orchestrator.events.page import Page
from orchestrator.events.types import Answered
from orchestrator.history.folder import JobFolder
from orchestrator.history.folder_view import view_without_controller
from orchestrator.history.job_view import JobView
from orchestrator.history.proposal import Proposal
from planner.profile import Profile
from planner.wording import counted

if TYPE_CHECKING:
    from orchestrator.client.submit import SubmittedJob
    from orchestrator.spec.job_spec import Spec

ANSWER_S = 5.0
"""Limit for a controller's answer when all controllers of a cluster are asked."""
CLEAR_S = 120.0
"""Limit for killing what is left of a job."""


class JobClient(Jobs):
    """The jobs of the cluster that this process is a driver of. Every method also raises `ClusterSilent` if the cluster
    does not answer.

    Args:
        address: address of the cluster, for messages.
    """

    def __init__(self, address: str = "auto") -> None:
        self._address = address
        self._calls = RayCalls()

    async def submit(
        self, spec: Spec, *, resume: bool = False, profile: Path | None = None, replay: Path | None = None
    ) -> SubmittedJob:
        from orchestrator.client.submit import submit

        return await asyncio.to_thread(submit, spec, resume=resume, profile=profile, replay=replay)

    async def jobs(self) -> tuple[str, ...]:
        return tuple(await self._calls.run(job_names))

    async def nodes(self) -> tuple[NodeState, ...]:
        """The cluster's nodes, those that died too."""
        return await self._calls.run(cluster_nodes)

    async def ranks(self) -> dict[str, int]:
        """Job -> number of its living ranks, including jobs without a controller."""
        jobs = await self._calls.run(living_jobs)
        return {job: len(actors.ranks) for job, actors in jobs.items() if actors.ranks}

    async def view(self, job: str, *, folder: str | None = None, timeout_s: float | None = None) -> JobView:
        try:
            text: bytes = await self._ask(job, "view", timeout_s=timeout_s)
            return await asyncio.to_thread(JobView.from_json, text)
        except (NoSuchJob, NoController):
            if folder is None:
                raise
            return await asyncio.to_thread(view_without_controller, JobFolder(folder))

    async def summaries(self) -> tuple[JobSummary, ...]:
        ranks, names = await self.ranks(), await self.jobs()
        answered = await asyncio.gather(*(self._summary(name, ranks.get(name, 0)) for name in names))
        abandoned = [
            without_view(
                name,
                "abandoned",
                f"{counted(count, 'rank')} without a controller; clear with freshet reap {name}",
            )
            for name, count in ranks.items()
            if name not in names
        ]
        return tuple(sorted([*answered, *abandoned], key=lambda summary: summary.job))

    async def _summary(self, name: str, ranks: int) -> JobSummary:
        try:
            return job_summary(await self.view(name, timeout_s=ANSWER_S))
        except (ControllerSilent, NoController, NoSuchJob):
            return without_view(
                name,
                "silent",
                f"its controller does not answer: being started again, or hung; {counted(ranks, 'rank')} there",
            )

    async def profile(self, job: str) -> Profile | None:
        folder = (await self.view(job)).folder
        return await asyncio.to_thread(profile_beside, JobFolder(folder).events_path)

    async def page(self, job: str, after: int, wait_s: float = 0.0) -> Page:
        return await self._ask(job, "read", after, wait_s)

    async def propose(self, job: str, partition: Sequence[int] | None = None) -> Proposal:
        wanted = None if partition is None else list(partition)
        return await self._ask(job, "propose", wanted)

    async def _outcome(self, command: Command, wait_s: float) -> Answered | None:
        return await self._ask(command.job, "outcome", command.id, wait_s)

    async def reap(self, job: str, *, force: bool = False) -> str:
        """Clear what an abandoned job left: ranks, placement groups, a controller. Return in words what there was.

        Args:
            force: even if its controller answers, or may answer later.

        Raises:
            NoSuchJob: the cluster has nothing of that name.
            Refused: the job is at work, or may be.
        """
        ranks, controller = await self.ranks(), await self._calls.run(controller_of, job)
        if controller is None and job not in ranks:
            known = listed({*await self.jobs(), *ranks})
            raise NoSuchJob(f"nothing of a job {job!r} is at {self._address}; there is {known}")
        if controller is not None and not force:
            await self._check_ended(job)
        await self._calls.run(_clear, job, controller, limit_s=CLEAR_S)
        had = " and its controller" if controller is not None else ""
        # The ranks counted before: once their controller is dead, ranks end by themselves.
        return f"{job}: {counted(ranks.get(job, 0), 'rank')}{had} cleared away; go on from its checkpoint with --resume"

    async def dismiss(self, job: str) -> None:
        """Release the controller of a job that has ended; it otherwise waits a while for readers of the end."""
        if (controller := await self._calls.run(controller_of, job)) is not None:
            await self._calls.run(_kill, controller)

    async def _check_ended(self, job: str) -> None:
        """Raises:
        Refused: the job is at work.
        ControllerSilent: it may be.
        """
        with suppress(NoController, NoSuchJob):
            view = await self.view(job)
            if view.outcome is None:
                raise Refused(
                    f"job {job!r} is {view.state}, at step {view.step} of {view.last_step}: end it with freshet"
                    f" cancel {job}, or kill it with freshet reap {job} --force"
                )

    async def _ask(self, job: str, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        controller = await known_controller(job, self._address, self._calls)
        return await ask(job, controller, method, *arguments, calls=self._calls, timeout_s=timeout_s)

    async def send(self, job: str, command: JobCommand) -> Command:
        id = command_id(command.id)
        # With one id it is safe to ask the next controller if this one dies.
        text: str = await self._ask(job, "command", id, command.log_name, command.arguments(), command.by)
        return Command(job=job, id=id, text=text)


def _kill(controller: Any) -> None:
    import ray

    ray.kill(controller)


def _clear(job: str, controller: Any) -> None:
    from orchestrator.cluster.ray_hosts import reap

    if controller is not None:
        _kill(controller)
    reap(job)
