"""`freshet status` and `freshet stop`: jobs of a cluster that is running already.

Ray is imported once `cluster.connected` has set what Ray reads at its import.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from orchestrator import cluster
from workers.protocol import JobError, Request


def status_lines(address: str) -> Iterator[str]:
    """A line per job of the cluster at `address`.

    Raises:
        JobError: there is no such cluster.
    """
    with _joined(address):
        import ray

        names = _jobs()
        for name in names:
            status: Any = ray.get(ray.get_actor(name, namespace=cluster.NAMESPACE).status.remote())
            yield f"{status.job}: {status.state}, step {status.step} of {status.steps}, {status.output}"
        if not names:
            yield "no job is running"


def stop_job(job: str, address: str, *, now: bool) -> None:
    """Ask `job` to stop, with a checkpoint or at once.

    Raises:
        JobError: there is no such cluster or job.
    """
    with _joined(address):
        import ray

        from orchestrator.controller import find

        controller = find(job)
        if controller is None:
            names = _jobs()
            near = difflib.get_close_matches(job, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"running: {', '.join(names) or 'none'}"
            raise JobError(f"no job {job!r} is running at {address}; {hint}")
        ray.get(controller.abort.remote() if now else controller.request.remote(Request.STOP))


def _joined(address: str) -> Any:
    if address == "local":
        raise JobError("a local cluster belongs to its own `freshet train`: use its address, or auto")
    return cluster.connected(address, cpus=0)


def _jobs() -> list[str]:
    """Names of the jobs whose controllers live: ranks have a slash in theirs."""
    import ray

    actors: Any = ray.util.list_named_actors(all_namespaces=True)
    return sorted(
        entry["name"]
        for entry in actors
        if entry["namespace"] == cluster.NAMESPACE and "/" not in entry["name"]
    )
