"""Runs the commands that steer a running job: `freshet pause`, `resume`, `cancel`, `checkpoint`, `move`, `drain`,
`undrain`, `scale`, `freeze`, `fault` and `reap`. Each is one call of a job client, over Ray or REST."""

from __future__ import annotations

import getpass
import json
import os
import socket
from collections.abc import Callable
from typing import Any

from orchestrator.client.asking import joined
from orchestrator.client.blocking_client import BlockingJobClient, BlockingJobs
from orchestrator.client.errors import NoController, NoSuchJob
from orchestrator.client.jobs import Command
from orchestrator.client.opening import opened
from orchestrator.events.types import Answered


def sender() -> str:
    """Who sends commands from here, for the job's log."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = f"user {os.getuid()}"
    return f"{user} on {socket.gethostname()}"


def steer(
    address: str | None, send: Callable[[BlockingJobs], Command], *, wait: bool, as_json: bool = False
) -> str:
    """Send a command to a job, and return what happens or has happened, in words or as JSON.

    Args:
        wait: until it is decided.

    Raises:
        JobError: there is no such cluster, service or job, its controller does not answer or refuses; or, with
            `wait`, it was not done.
    """
    with opened(address) as client:
        command = send(client)
        return answer_text(command, client.outcome(command) if wait else None, as_json=as_json)


def answer_text(command: Command, answered: Answered | None, *, as_json: bool) -> str:
    """Expected effect of `command`, or its outcome if it is `answered`."""
    text = command.text if answered is None else answered.text
    if not as_json:
        return text
    answer = {
        "job": command.job,
        "id": command.id,
        "text": text,
        "done": None if answered is None else answered.done,
        "step": None if answered is None else answered.step,
    }
    return json.dumps(answer)


def pause_job(
    job: str, address: str | None, *, id: str | None = None, wait: bool = True, as_json: bool = False
) -> str:
    """Pause `job`."""
    return steer(address, lambda jobs: jobs.pause(job, id=id, by=sender()), wait=wait, as_json=as_json)


def resume_job(
    job: str, address: str | None, *, id: str | None = None, wait: bool = False, as_json: bool = False
) -> str:
    """Have the paused `job` train on."""
    return steer(address, lambda jobs: jobs.resume(job, id=id, by=sender()), wait=wait, as_json=as_json)


def checkpoint_job(
    job: str, address: str | None, *, id: str | None = None, wait: bool = True, as_json: bool = False
) -> str:
    """Have `job` write a checkpoint."""
    return steer(address, lambda jobs: jobs.checkpoint(job, id=id, by=sender()), wait=wait, as_json=as_json)


def cancel_job(
    job: str,
    address: str | None,
    *,
    now: bool,
    id: str | None = None,
    wait: bool = False,
    as_json: bool = False,
) -> str:
    """End `job`, with a checkpoint or at once."""
    with opened(address) as client:
        folder = client.view(job).folder if wait else None
        command = (client.abort if now else client.stop)(job, id=id, by=sender())
        answered = _end_of(client, command, folder) if wait else None
        return answer_text(command, answered, as_json=as_json)


def _end_of(client: BlockingJobs, command: Command, folder: str | None) -> Answered:
    """The answer to a command that ends the job, and with it the controller that would tell."""
    try:
        return client.outcome(command)
    except (NoController, NoSuchJob):
        entry = client.view(command.job, folder=folder).commands.get(command.id)
        if entry is None or entry.answer is None:
            raise
        return entry.answer


def move_layers(
    job: str,
    address: str | None,
    layers: str,
    rank: int,
    *,
    id: str | None = None,
    wait: bool = False,
    as_json: bool = False,
) -> str:
    """Move layers of `job` to another rank."""
    return steer(
        address, lambda jobs: jobs.move(job, layers, rank, id=id, by=sender()), wait=wait, as_json=as_json
    )


def fault_job(
    job: str, address: str | None, drill: dict[str, Any], *, id: str | None = None, as_json: bool = False
) -> str:
    """Inject a fault into `job`.

    Args:
        drill: a `workers.fault_injection.drill.Drill`, as JSON values.
    """
    return steer(
        address, lambda jobs: jobs.fault(job, drill, id=id, by=sender()), wait=False, as_json=as_json
    )


def reap_job(job: str, address: str, *, force: bool) -> str:
    """Clear what an abandoned job left: ranks, placement groups, a controller. Return in words what there was.

    Args:
        force: even if its controller answers, or may answer later.

    Raises:
        JobError: there is no such cluster, nothing of that name, or the job is at work or may be.
    """
    with joined(address) as connection:
        return BlockingJobClient(connection.address).reap(job, force=force)
