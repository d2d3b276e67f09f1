"""`freshet status`, `freshet stop`, `freshet reap`, `freshet move` and `freshet fault`: jobs of a cluster that is
running already.

Ray is imported once `cluster.connected` has set what Ray reads at its import.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from orchestrator.client.asking import (
    NoController,
    ask,
    controller_of,
    job_names,
    joined,
    known_controller,
    listed,
)
from orchestrator.cluster import connection as cluster
from orchestrator.quantities import counted
from workers.protocol import JobError, Request

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
            _check_ended(job, controller)
        if controller is not None:
            ray.kill(controller)
        reap(job)
        had = " and its controller" if controller is not None else ""
        # As many as there were before: once their controller is dead, ranks end by themselves.
        return f"{job}: {counted(ranks.get(job, 0), 'rank')}{had} cleared away; go on from its checkpoint with --resume"


def _check_ended(job: str, controller: Any) -> None:
    """Raises:
    JobError: the job is at work, or its controller does not say so.
    """
    with suppress(NoController):
        status = ask(job, controller, "status")
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
        controller = known_controller(job, address)
        if now:
            ask(job, controller, "abort")
        else:
            ask(job, controller, "request", Request.STOP)


def checkpoint_job(job: str, address: str) -> str:
    """Ask `job` for a checkpoint; returns what will happen, in words.

    Raises:
        JobError: there is no such cluster or job, or its controller does not answer.
    """
    with joined(address):
        ask(job, known_controller(job, address), "request", Request.CHECKPOINT)
        return f"{job} writes a checkpoint after the step in flight"


def fault_job(job: str, address: str, drill: dict[str, Any]) -> str:
    """Have a drill strike `job`; returns what will happen, in words.

    Args:
        drill: an `orchestrator.controller.faults.Drill`, as JSON values.

    Raises:
        JobError: there is no such cluster, job, rank or node, the job allows no faults, or its controller does not
            answer.
    """
    with joined(address):
        return ask(job, known_controller(job, address), "fault", drill, again=False)


def move_layers(job: str, address: str, layers: str, rank: int) -> str:
    """Have layers of `job` change ranks; returns what will happen, in words.

    Raises:
        JobError: there is no such cluster, job, layer or rank; they are not next to it, or do not fit its memory; or
            the controller does not answer.
    """
    with joined(address):
        return ask(job, known_controller(job, address), "move", layers, rank)


def _status(job: str) -> Any:
    """What the controller of `job` says of it; None if it does not answer."""
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    try:
        return ray.get(ray.get_actor(job, namespace=cluster.NAMESPACE).status.remote(), timeout=ANSWER_S)
    except (GetTimeoutError, RayActorError, ValueError):
        return None


def _ranks() -> dict[str, int]:
    """Job -> how many of its ranks live."""
    import ray

    actors: Any = ray.util.list_named_actors(all_namespaces=True)
    names = (entry["name"] for entry in actors if entry["namespace"] == cluster.NAMESPACE)
    return dict(Counter(name.rpartition("/")[0] for name in names if "/" in name))
