"""`JobClient`: the interface to the jobs of a cluster. It submits jobs, shows them, reads their events and sends
commands.

All code outside a job's own processes uses it, or `BlockingJobClient`. The process is a driver of the cluster: see
`joined`. No call blocks the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.analysis.job_summary import JobSummary, job_summary, without_view
from orchestrator.analysis.step_memory import profile_beside
from orchestrator.client.asking import ask, controller_of, job_names, known_controller, listed
from orchestrator.client.cluster_state import NodeState, cluster_nodes
from orchestrator.client.errors import ControllerSilent, NoController, NoSuchJob, Refused
from orchestrator.client.jobs import POLL_S, Command, Missed, command_id, events_of
from orchestrator.client.ray_calls import RayCalls
from orchestrator.cluster.actor_names import living_jobs
from orchestrator.events.folder import JobFolder
from orchestrator.events.page import Page
from orchestrator.events.types import Answered, Record
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


class JobClient:
    """The jobs of the cluster that this process is a driver of.

    Every method raises `ClusterSilent` if the cluster does not answer. One that names a job raises `NoSuchJob`,
    `NoController` or `ControllerSilent` if the job does not answer, and `Refused` if its controller refuses. A command
    that is sent twice with one `id` is done once; the same id for another command raises `CommandIdReused`. Without
    `id` a random one is used. `by` says who sends it and from where, for the log.

    Args:
        address: address of the cluster, for messages.
    """

    def __init__(self, address: str = "auto") -> None:
        self._address = address
        self._calls = RayCalls()

    async def submit(
        self, spec: Spec, *, resume: bool = False, profile: Path | None = None, replay: Path | None = None
    ) -> SubmittedJob:
        """Check, measure, plan and start a job; returns once its controller has accepted it, and does not follow it.

        Args:
            resume: continue from the newest checkpoint in the job's folder.
            profile: plan with this file instead of measuring.
            replay: freeze as this event log says, without new decisions.

        Raises:
            JobError: something that the user can fix.
        """
        from orchestrator.client.submit import submit

        return await asyncio.to_thread(submit, spec, resume=resume, profile=profile, replay=replay)

    async def jobs(self) -> tuple[str, ...]:
        """Names of the jobs that have a controller."""
        return tuple(await self._calls.run(job_names))

    async def nodes(self) -> tuple[NodeState, ...]:
        """The cluster's nodes, those that died too."""
        return await self._calls.run(cluster_nodes)

    async def ranks(self) -> dict[str, int]:
        """Job -> number of its living ranks, including jobs without a controller."""
        jobs = await self._calls.run(living_jobs)
        return {job: len(actors.ranks) for job, actors in jobs.items() if actors.ranks}

    async def view(self, job: str, *, folder: str | None = None, timeout_s: float | None = None) -> JobView:
        """The job's state and history.

        Args:
            folder: the job's folder, from which a job without a controller is read, as it ended or was lost.
        """
        try:
            text: bytes = await self._ask(job, "view", timeout_s=timeout_s)
            return await asyncio.to_thread(JobView.from_json, text)
        except (NoSuchJob, NoController):
            if folder is None:
                raise
            return await asyncio.to_thread(view_without_controller, JobFolder(folder))

    async def summaries(self) -> tuple[JobSummary, ...]:
        """All jobs in a few numbers, by name: with the state `silent` where a controller does not answer, and
        `abandoned` where ranks have none."""
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
        """What was measured of the job's layers and links; None if nothing was, or the file is not visible."""
        folder = (await self.view(job)).folder
        return await asyncio.to_thread(profile_beside, JobFolder(folder).events_path)

    async def page(self, job: str, after: int, wait_s: float = 0.0) -> Page:
        """The events after the first `after`; waits up to `wait_s` for one."""
        return await self._ask(job, "read", after, wait_s)

    def events(self, job: str, *, after: int = 0) -> AsyncIterator[Record | Missed]:
        """The events of the job after the first `after`, as they arrive, until it has ended. A reader that is too slow
        gets `Missed` for the events that the controller no longer keeps."""
        return events_of(self, job, after)

    async def stop(self, job: str, *, id: str | None = None, by: str = "") -> Command:
        """Stop after the step in flight, with a checkpoint."""
        return await self._send(job, "stop", {}, id, by)

    async def abort(self, job: str, *, id: str | None = None, by: str = "") -> Command:
        """End at once, without a checkpoint."""
        return await self._send(job, "abort", {}, id, by)

    async def checkpoint(self, job: str, *, id: str | None = None, by: str = "") -> Command:
        """Write a checkpoint after the step in flight."""
        return await self._send(job, "checkpoint", {}, id, by)

    async def pause(self, job: str, *, id: str | None = None, by: str = "") -> Command:
        """Pause after the step in flight, with a checkpoint, and release the ranks."""
        return await self._send(job, "pause", {}, id, by)

    async def resume(self, job: str, *, id: str | None = None, by: str = "") -> Command:
        """Resume a paused job from its checkpoint, once there is room for its ranks."""
        return await self._send(job, "resume", {}, id, by)

    async def move(self, job: str, layers: str, rank: int, *, id: str | None = None, by: str = "") -> Command:
        """Move `layers`, such as `3` or `3-4`, to `rank`."""
        return await self._send(job, "move", {"layers": layers, "rank": rank}, id, by)

    async def freeze(
        self,
        job: str,
        *,
        method: str | None = None,
        r_max: float | None = None,
        id: str | None = None,
        by: str = "",
    ) -> Command:
        """Change what the job freezes, from the same step on all ranks. With no monitored times of its plan, the job
        monitors first.

        Args:
            method: a `freeze.method`, `none` to freeze nothing; None: as it is.
            r_max: the largest mean freeze ratio of a stage; None: as it is.
        """
        return await self._send(job, "freeze", {"method": method, "r_max": r_max}, id, by)

    async def fault(
        self, job: str, drill: Mapping[str, Any], *, id: str | None = None, by: str = ""
    ) -> Command:
        """Inject the fault `drill`, a `workers.fault_injection.drill.Drill` as JSON values."""
        return await self._send(job, "fault", {"drill": dict(drill)}, id, by)

    async def drain(
        self, job: str, node: str, deadline_s: float = 30.0, *, id: str | None = None, by: str = ""
    ) -> Command:
        """Have the job leave a node: its ranks there hand their layers over, and it starts none there for `deadline_s`
        seconds. Other jobs stay.

        Args:
            node: a node's id, the beginning of one, or its host.
        """
        return await self._send(job, "drain", {"node": node, "deadline_s": deadline_s}, id, by)

    async def scale(
        self,
        job: str,
        *,
        ranks: int | None = None,
        spares: int | None = None,
        id: str | None = None,
        by: str = "",
    ) -> Command:
        """Give the job another number of ranks from now on: it shrinks at a commit, and grows once the ranks are up.

        Args:
            ranks: of one replica's pipeline, as `pipeline.ranks`; None: as many as before.
            spares: as `elastic.spares`; None: as many as before.
        """
        return await self._send(job, "scale", {"ranks": ranks, "spares": spares}, id, by)

    async def propose(self, job: str, partition: Sequence[int] | None = None) -> Proposal:
        """What another partition would bring, validated and simulated. Nothing changes.

        Args:
            partition: layers per stage; None: the planner's own best for the same ranks and schedule.
        """
        wanted = None if partition is None else list(partition)
        return await self._ask(job, "propose", wanted)

    async def apply(
        self,
        job: str,
        partition: Sequence[int],
        *,
        base: tuple[int, int] | None = None,
        id: str | None = None,
        by: str = "",
    ) -> Command:
        """Have the training ranks take up `partition`, as `elastic.migration` says.

        Args:
            base: (epoch, version) of the plan that it is to replace; None: whichever is the newest.

        Raises:
            PlanChanged: the newest plan is another one than `base`.
        """
        arguments = {"partition": list(partition), "base": None if base is None else list(base)}
        return await self._send(job, "plan", arguments, id, by)

    async def outcome(self, command: Command, *, timeout_s: float | None = None) -> Answered:
        """Wait for the answer to `command`.

        Raises:
            Refused: it was not done; says why.
            TimeoutError: it is not decided after `timeout_s`.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = POLL_S if deadline_s is None else min(POLL_S, max(0.0, deadline_s - time.monotonic()))
            answer: Answered | None = await self._ask(command.job, "outcome", command.id, left_s)
            if answer is not None:
                if not answer.done:
                    raise Refused(answer.text)
                return answer
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise TimeoutError(
                    f"job {command.job!r} has not decided command {command.id!r} in {timeout_s:g} s"
                )

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

    async def _send(self, job: str, name: str, arguments: dict[str, Any], id: str | None, by: str) -> Command:
        id = command_id(id)
        # With one id it is safe to ask the next controller if this one dies.
        text: str = await self._ask(job, "command", id, name, arguments, by)
        return Command(job=job, id=id, text=text)


def _kill(controller: Any) -> None:
    import ray

    ray.kill(controller)


def _clear(job: str, controller: Any) -> None:
    from orchestrator.cluster.ray_hosts import reap

    if controller is not None:
        _kill(controller)
    reap(job)
