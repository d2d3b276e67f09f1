"""Runs the commands on jobs of a running cluster: `freshet status`, `checkpoint`, `pause`, `resume`, `stop`, `move`,
`fault` and `reap`. Each is one call of the job client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from orchestrator.client.asking import ControllerSilent, NoController, NoSuchJob, joined
from orchestrator.client.blocking_client import BlockingJobClient
from orchestrator.history.job_view import JobView
from planner.wording import counted

ANSWER_S = 5.0
"""Limit for a controller's answer when all controllers of a cluster are asked."""


def status_lines(address: str) -> Iterator[str]:
    """A line per job of the cluster at `address`.

    Raises:
        JobError: there is no such cluster.
    """
    with joined(address):
        client = BlockingJobClient(address)
        names, ranks = client.jobs(), client.ranks()
        for name in names:
            living = ranks.pop(name, 0)
            try:
                yield status_line(name, client.view(name, timeout_s=ANSWER_S))
            except (ControllerSilent, NoController, NoSuchJob):
                yield (
                    f"{name}: its controller does not answer: being started again, or hung; {counted(living, 'rank')}"
                    " there"
                )
        for name, count in sorted(ranks.items()):
            yield f"{name}: abandoned, {counted(count, 'rank')} without a controller; clear with freshet reap {name}"
        if not names and not ranks:
            yield "no job is running"


def status_line(job: str, view: JobView) -> str:
    """The state of `job` in a line."""
    alive = sorted(view.ranks.alive)
    ranks = f"ranks {', '.join(map(str, alive))}, " if alive and view.outcome is None else ""
    if view.ranks.placing and view.outcome is None:
        ranks += f"{counted(len(view.ranks.placing), 'rank')} starting or without resources, "
    trouble = f"; {view.trouble}" if view.trouble else ""
    return f"{job}: {view.state}, step {view.step} of {view.last_step}, {ranks}{view.folder}{trouble}"


def reap_job(job: str, address: str, *, force: bool) -> str:
    """Clear what an abandoned job left: ranks, placement groups, a controller. Return in words what there was.

    Args:
        force: even if its controller answers, or may answer later.

    Raises:
        JobError: there is no such cluster, nothing of that name, or the job is at work or may be.
    """
    with joined(address):
        return BlockingJobClient(address).reap(job, force=force)


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
    """Have `job` write a checkpoint, wait for it, and return its description.

    Raises:
        JobError: there is no such cluster or job, its controller does not answer, or it cannot be written.
    """
    with joined(address):
        client = BlockingJobClient(address)
        return client.outcome(client.checkpoint(job)).text


def pause_job(job: str, address: str) -> str:
    """Pause `job`, wait until it has paused, and return the step in words.

    Raises:
        JobError: there is no such cluster or job, its controller does not answer, or it has nothing to pause.
    """
    with joined(address):
        client = BlockingJobClient(address)
        return client.outcome(client.pause(job)).text


def resume_job(job: str, address: str) -> str:
    """Resume the paused `job`. Return what will happen, in words.

    Raises:
        JobError: there is no such cluster or job, its controller does not answer, or it is not paused.
    """
    with joined(address):
        return BlockingJobClient(address).resume(job).text


def fault_job(job: str, address: str, drill: dict[str, Any]) -> str:
    """Inject a fault into `job`. Return what will happen, in words.

    Args:
        drill: a `workers.fault_injection.drill.Drill`, as JSON values.

    Raises:
        JobError: there is no such cluster, job, rank or node, the job allows no faults, or its controller does not
            answer.
    """
    with joined(address):
        return BlockingJobClient(address).fault(job, drill).text


def move_layers(job: str, address: str, layers: str, rank: int) -> str:
    """Move layers of `job` to another rank. Return what will happen, in words.

    Raises:
        JobError: there is no such cluster, job, layer or rank; the layers are not next to the rank's, or do not fit
            its memory; or the controller does not answer.
    """
    with joined(address):
        return BlockingJobClient(address).move(job, layers, rank).text
