"""The jobs of a cluster that is running already, from outside: which there are, and what their controllers answer.

A controller that was killed is started again: one that does not answer now may do so in a while, and its job is not
gone. Ray is imported once `cluster.connected` has set what Ray reads at its import.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from orchestrator.cluster import connection as cluster
from orchestrator.cluster.actor_names import living_jobs
from orchestrator.history.command_table import CommandIdReused
from workers.protocol import JobError

ANSWER_S = 90.0
"""How long a controller may take to answer: longer than one that is started again lets who asks wait, see
`controller.PATIENCE_S`."""
RETRY_S = 0.5


class NoSuchJob(JobError):
    """The cluster has no job of that name."""


class NoController(JobError):
    """A job's controller is gone, and none will come in its place."""


class ControllerSilent(JobError):
    """A job's controller does not answer: it hangs, or is being started again."""


class Refused(JobError):
    """A job's controller says no; the message says why."""


def ask(
    job: str,
    controller: Any,
    method: str,
    *arguments: Any,
    timeout_s: float | None = None,
) -> Any:
    """What the controller of `job` answers; waits while it is started again.

    Args:
        timeout_s: how long it may take; None: `ANSWER_S`.

    Raises:
        NoController: it has ended.
        ControllerSilent: it did not answer in time.
        Refused: it raised a JobError.
        CommandIdReused: the id was that of another command.
    """
    import ray
    from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError

    timeout_s = ANSWER_S if timeout_s is None else timeout_s
    deadline = time.monotonic() + timeout_s
    call = getattr(controller, method).options(max_task_retries=-1)
    while True:
        try:
            return ray.get(call.remote(*arguments), timeout=max(0.0, deadline - time.monotonic()))
        except RayTaskError as error:
            if isinstance(error.cause, CommandIdReused):
                raise CommandIdReused(str(error.cause)) from None
            if isinstance(error.cause, JobError):
                raise Refused(str(error.cause)) from None
            raise
        except GetTimeoutError:
            raise _silent(job, timeout_s) from None
        except RayActorError as error:
            # Which of Ray's errors it is does not tell: a name is kept as long as somebody is started again for it.
            if not isinstance(error, ActorUnavailableError) and controller_of(job) is None:
                raise NoController(f"the controller of job {job!r} is gone: {last_line(error)}") from None
            if time.monotonic() + RETRY_S >= deadline:
                raise _silent(job, timeout_s) from None
            time.sleep(RETRY_S)


def _silent(job: str, timeout_s: float) -> ControllerSilent:
    return ControllerSilent(
        f"the controller of job {job!r} has not answered for {timeout_s:g} s: it hangs, or is still being started"
        f" again. Its ranks train on: ask again later, or end it with `freshet reap {job} --force` and go on from its"
        " newest checkpoint with --resume"
    )


def last_line(error: Exception) -> str:
    """What Ray's `error` comes to, without its story."""
    return str(error).strip().rpartition("\n")[2]


def controller_of(job: str) -> Any:
    """The controller of `job`, also while it is started again; None if there is none."""
    from orchestrator.controller.actor import find

    return find(job)


def known_controller(job: str, address: str) -> Any:
    """The controller of `job`.

    Raises:
        NoSuchJob: there is none.
    """
    controller = controller_of(job)
    if controller is None:
        names = job_names()
        near = difflib.get_close_matches(job, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"running: {listed(names)}"
        raise NoSuchJob(f"no job {job!r} is running at {address}; {hint}")
    return controller


def joined(address: str) -> AbstractContextManager[cluster.Connection]:
    """Be a driver of a cluster that is running already.

    Raises:
        JobError: there is none.
    """
    if address == "local":
        raise JobError("a local cluster belongs to its own `freshet train`: use its address, or auto")
    return cluster.connected(address, cpus=0)


def job_names() -> list[str]:
    """Names of the jobs whose controllers live."""
    return [job for job, actors in living_jobs().items() if actors.controller]


def listed(names: Iterable[str]) -> str:
    """`names` in a sentence."""
    return ", ".join(sorted(names)) or "none"
