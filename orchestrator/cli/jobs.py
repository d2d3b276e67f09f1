"""`freshet status`, `freshet stop`, `freshet reap` and `freshet fault`: jobs of a cluster that is running already.

Ray is imported once `cluster.connected` has set what Ray reads at its import.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from orchestrator import cluster
from orchestrator.quantities import counted
from workers.protocol import JobError, Request

ANSWER_S = 5.0
"""How long a controller may take to say how its job is."""


def status_lines(address: str) -> Iterator[str]:
    """A line per job of the cluster at `address`.

    Raises:
        JobError: there is no such cluster.
    """
    with _joined(address):
        names, ranks = _jobs(), _ranks()
        for name in names:
            status = _status(name)
            there = counted(ranks.pop(name, 0), "rank")
            if status is None:
                yield f"{name}: its controller does not answer: being started again, or hung; {there} there"
            else:
                yield f"{status.job}: {status.state}, step {status.step} of {status.steps}, {status.output}"
        for name, count in sorted(ranks.items()):
            yield f"{name}: abandoned, {counted(count, 'rank')} without a controller; clear with freshet reap {name}"
        if not names and not ranks:
            yield "no job is running"


def reap_job(job: str, address: str, *, force: bool) -> str:
    """Clear what an abandoned job left: ranks, placement groups, a controller; says what there was.

    Args:
        force: even if its controller answers.

    Raises:
        JobError: there is no such cluster, nothing of that name, or the job is at work.
    """
    with _joined(address):
        import ray

        from orchestrator.controller import find
        from orchestrator.ray_hosts import reap

        controller, ranks = find(job), _ranks()
        if controller is None and job not in ranks:
            raise JobError(f"nothing of a job {job!r} is at {address}; there is {_known({*_jobs(), *ranks})}")
        status = _status(job) if controller is not None else None
        if status is not None and status.state not in ("finished", "failed") and not force:
            raise JobError(
                f"job {job!r} is {status.state}, at step {status.step} of {status.steps}: end it with freshet stop"
                f" {job}, or kill it with freshet reap {job} --force"
            )
        if controller is not None:
            ray.kill(controller)
        reap(job)
        had = " and its controller" if controller is not None else ""
        # As many as there were before: once their controller is dead, ranks end by themselves.
        return f"{job}: {counted(ranks.get(job, 0), 'rank')}{had} cleared away; go on from its checkpoint with --resume"


def stop_job(job: str, address: str, *, now: bool) -> None:
    """Ask `job` to stop, with a checkpoint or at once.

    Raises:
        JobError: there is no such cluster or job.
    """
    with _joined(address):
        if now:
            _asked(job, address, "abort")
        else:
            _asked(job, address, "request", Request.STOP)


def fault_job(job: str, address: str, drill: dict[str, Any]) -> str:
    """Have a drill strike `job`; returns what will happen, in words.

    Args:
        drill: an `orchestrator.faults.Drill`, as JSON values.

    Raises:
        JobError: there is no such cluster, job, rank or node, or the job allows no faults.
    """
    with _joined(address):
        return _asked(job, address, "fault", drill, again=False)


def move_layers(job: str, address: str, layers: str, rank: int) -> str:
    """Have layers of `job` change ranks; returns what will happen, in words.

    Raises:
        JobError: there is no such cluster, job, layer or rank; they are not next to it, or do not fit its memory.
    """
    with _joined(address):
        return _asked(job, address, "move", layers, rank)


def _asked(job: str, address: str, method: str, *arguments: Any, again: bool = True) -> Any:
    """What the controller of `job` answers.

    Args:
        again: if it dies before it has answered, the next one is asked.

    Raises:
        JobError: there is no such job, or the controller raised it.
    """
    import ray
    from ray.exceptions import RayTaskError

    asked = getattr(_controller(job, address), method).options(max_task_retries=-1 if again else 0)
    try:
        return ray.get(asked.remote(*arguments))
    except RayTaskError as error:
        if isinstance(error.cause, JobError):
            raise JobError(str(error.cause)) from None
        raise


def _controller(job: str, address: str) -> Any:
    """The controller of `job`.

    Raises:
        JobError: there is none.
    """
    from orchestrator.controller import find

    controller = find(job)
    if controller is None:
        names = _jobs()
        near = difflib.get_close_matches(job, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"running: {_known(names)}"
        raise JobError(f"no job {job!r} is running at {address}; {hint}")
    return controller


def _joined(address: str) -> Any:
    if address == "local":
        raise JobError("a local cluster belongs to its own `freshet train`: use its address, or auto")
    return cluster.connected(address, cpus=0)


def _known(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


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


def _jobs() -> list[str]:
    """Names of the jobs whose controllers live: ranks have a slash in theirs."""
    import ray

    actors: Any = ray.util.list_named_actors(all_namespaces=True)
    return sorted(
        entry["name"]
        for entry in actors
        if entry["namespace"] == cluster.NAMESPACE and "/" not in entry["name"]
    )
