"""Asks a job's controller one question: its answer, or a typed error that says why there is none.

Ray restarts a killed controller: one that does not answer now may answer later, and its job is not gone. Ray is
imported only after `cluster.connected` has set what Ray reads at its import.
"""

from __future__ import annotations

import asyncio
import difflib
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from orchestrator.client.errors import (
    CommandIdReused,
    ControllerSilent,
    JobError,
    NoController,
    NoSuchJob,
    PlanChanged,
    Refused,
)
from orchestrator.client.ray_calls import RayCalls
from orchestrator.cluster import connection as cluster
from orchestrator.cluster.actor_names import living_jobs

ANSWER_S = 90.0
"""Limit for a controller's answer: longer than a new controller makes a question wait during a takeover, see
`controller.PATIENCE_S`."""
RETRY_S = 0.5


async def ask(
    job: str,
    controller: Any,
    method: str,
    *arguments: Any,
    calls: RayCalls,
    timeout_s: float | None = None,
) -> Any:
    """Call `method` of the controller of `job` and return its answer; waits while Ray restarts it, or its own head.

    Args:
        calls: asks Ray whether there is a controller.
        timeout_s: limit for the answer, and for Ray's; None: `ANSWER_S`.

    Raises:
        NoController: it has ended.
        ControllerSilent: it did not answer in time.
        ClusterSilent: Ray did not.
        Refused: it raised a JobError.
        CommandIdReused: another command had this id.
        PlanChanged: the plan that it was for is not the newest one any more.
    """
    from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

    timeout_s = ANSWER_S if timeout_s is None else timeout_s
    deadline_s = time.monotonic() + timeout_s
    call = getattr(controller, method).options(max_task_retries=-1)
    while True:
        try:
            async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
                return await call.remote(*arguments)
        except RayTaskError as error:
            if isinstance(error.cause, CommandIdReused):
                raise CommandIdReused(str(error.cause)) from None
            if isinstance(changed := error.cause, PlanChanged):
                raise PlanChanged(str(changed), changed.epoch, changed.version) from None
            if isinstance(error.cause, JobError):
                raise Refused(str(error.cause)) from None
            raise
        except TimeoutError:
            raise _silent(job, timeout_s) from None
        except RayActorError as error:
            # The kind of Ray's error says little: an actor keeps its name as long as Ray will restart it.
            left_s = max(0.0, deadline_s - time.monotonic())
            # A head that restarts, too, is waited for as long as the answer may take.
            if (
                not isinstance(error, ActorUnavailableError)
                and await calls.run(controller_of, job, limit_s=left_s) is None
            ):
                raise NoController(f"the controller of job {job!r} is gone: {last_line(error)}") from None
            if time.monotonic() + RETRY_S >= deadline_s:
                raise _silent(job, timeout_s) from None
            await asyncio.sleep(RETRY_S)


def _silent(job: str, timeout_s: float) -> ControllerSilent:
    return ControllerSilent(
        f"the controller of job {job!r} has not answered for {timeout_s:g} s: it hangs, or Ray is still starting it"
        f" again. Its ranks train on: ask again later, or end it with `freshet reap {job} --force` and go on from its"
        " newest checkpoint with --resume"
    )


def last_line(error: Exception) -> str:
    """The last line of Ray's `error`."""
    return str(error).strip().rpartition("\n")[2]


def controller_of(job: str) -> Any:
    """The controller of `job`, also while Ray restarts it; None if there is none. Blocks briefly."""
    from orchestrator.controller.actor import find

    return find(job)


async def known_controller(job: str, address: str, calls: RayCalls) -> Any:
    """The controller of `job`.

    Raises:
        NoSuchJob: there is none.
        ClusterSilent: the cluster does not answer.
    """
    controller = await calls.run(controller_of, job)
    if controller is None:
        names = await calls.run(job_names)
        near = difflib.get_close_matches(job, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"running: {listed(names)}"
        raise NoSuchJob(f"no job {job!r} is running at {address}; {hint}")
    return controller


def joined(address: str) -> AbstractContextManager[cluster.Connection]:
    """Become a driver of a running cluster.

    Raises:
        JobError: there is none.
    """
    if "://" in address and not address.startswith("ray://"):
        raise JobError(
            f"{address} is no address of a Ray cluster, which this command joins: use auto or HOST:PORT. Over a Freshet"
            " service, `freshet events a --follow` follows job a"
        )
    if address == "local":
        raise JobError("a local cluster belongs to its own `freshet train`: use its address, or auto")
    return cluster.connected(address, cpus=0)


def job_names() -> list[str]:
    """Names of the jobs with a living controller. Blocks briefly."""
    return [job for job, actors in living_jobs().items() if actors.controller]


def listed(names: Iterable[str]) -> str:
    """`names` as part of a sentence."""
    return ", ".join(sorted(names)) or "none"
