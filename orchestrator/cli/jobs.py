"""`freshet status`, `freshet stop`, `freshet reap`, `freshet move` and `freshet fault`: jobs of a cluster that is
running already.

Ray is imported once `cluster.connected` has set what Ray reads at its import.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from orchestrator.client.asking import (
    ControllerSilent,
    NoController,
    NoSuchJob,
    controller_of,
    job_names,
    joined,
    listed,
)
from orchestrator.client.job_client import BlockingJobClient
from orchestrator.cluster.actor_names import living_jobs
from orchestrator.quantities import counted
from workers.protocol import JobError

if TYPE_CHECKING:
    from orchestrator.controller.actor import Status

ANSWER_S = 5.0
"""How long a controller may take to say how its job is, where all of a cluster are asked."""


def status_lines(address: str) -> Iterator[str]:
    """A line per job of the cluster at `address`.

    Raises:
        JobError: there is no such cluster.
    """
    with joined(address):
        names, ranks = job_names(), _ranks()
        for name in names:
            status = _status(name)
            there = counted(ranks.pop(name, 0), "rank")
            if status is None:
                yield f"{name}: its controller does not answer: being started again, or hung; {there} there"
            else:
                up = f"ranks {', '.join(map(str, status.ranks))}, " if status.ranks else ""
                trouble = f"; {status.trouble}" if status.trouble else ""
                stands = f"{status.state}, step {status.step} of {status.steps}"
                yield f"{status.job}: {stands}, {up}{status.output}{trouble}"
        for name, count in sorted(ranks.items()):
            yield f"{name}: abandoned, {counted(count, 'rank')} without a controller; clear with freshet reap {name}"
        if not names and not ranks:
            yield "no job is running"


def reap_job(job: str, address: str, *, force: bool) -> str:
    """Clear what an abandoned job left: ranks, placement groups, a controller; says what there was.

    Args:
        force: even if its controller answers, or may answer later.

    Raises:
        JobError: there is no such cluster, nothing of that name, or the job is at work or may be.
    """
    with joined(address):
        import ray

        from orchestrator.cluster.ray_hosts import reap

        controller, ranks = controller_of(job), _ranks()
        if controller is None and job not in ranks:
            known = listed({*job_names(), *ranks})
            raise JobError(f"nothing of a job {job!r} is at {address}; there is {known}")
        if controller is not None and not force:
            _check_ended(job)
        if controller is not None:
            ray.kill(controller)
        reap(job)
        had = " and its controller" if controller is not None else ""
        # As many as there were before: once their controller is dead, ranks end by themselves.
        return f"{job}: {counted(ranks.get(job, 0), 'rank')}{had} cleared away; go on from its checkpoint with --resume"


def _check_ended(job: str) -> None:
    """Raises:
    JobError: the job is at work, or its controller does not say so.
    """
    with suppress(NoController, NoSuchJob):
        status = BlockingJobClient().view(job)
        if status.state not in ("finished", "failed"):
            raise JobError(
                f"job {job!r} is {status.state}, at step {status.step} of {status.steps}: end it with freshet stop"
                f" {job}, or kill it with freshet reap {job} --force"
            )


def stop_job(job: str, address: str, *, now: bool) -> None:
    """Ask `job` to stop, with a checkpoint or at once.

    Raises:
        JobError: there is no such cluster or job, or its controller does not answer.
    """
    with joined(address):
        client = BlockingJobClient(address)
        if now:
            client.abort(job)
        else:
            client.stop(job)


def checkpoint_job(job: str, address: str) -> str:
    """Have `job` write a checkpoint; waits for it, and returns which one it is.

    Raises:
        JobError: there is no such cluster or job, its controller does not answer, or it cannot be written.
    """
    with joined(address):
        client = BlockingJobClient(address)
        return client.outcome(client.checkpoint(job)).text


def fault_job(job: str, address: str, drill: dict[str, Any]) -> str:
    """Have a drill strike `job`; returns what will happen, in words.

    Args:
        drill: an `orchestrator.controller.faults.Drill`, as JSON values.

    Raises:
        JobError: there is no such cluster, job, rank or node, the job allows no faults, or its controller does not
            answer.
    """
    with joined(address):
        return BlockingJobClient(address).fault(job, drill).text


def move_layers(job: str, address: str, layers: str, rank: int) -> str:
    """Have layers of `job` change ranks; returns what will happen, in words.

    Raises:
        JobError: there is no such cluster, job, layer or rank; they are not next to it, or do not fit its memory; or
            the controller does not answer.
    """
    with joined(address):
        return BlockingJobClient(address).move(job, layers, rank).text


def _status(job: str) -> Status | None:
    """What the controller of `job` says of it; None if it does not answer."""
    try:
        return BlockingJobClient().view(job, timeout_s=ANSWER_S)
    except (ControllerSilent, NoController, NoSuchJob):
        return None


def _ranks() -> dict[str, int]:
    """Job -> how many of its ranks live."""
    return {job: len(actors.ranks) for job, actors in living_jobs().items() if actors.ranks}
