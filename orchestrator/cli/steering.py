"""Runs the commands that steer a running job, and `freshet reap`: one call of a job client, over Ray or REST."""

from __future__ import annotations

import getpass
import json
import os
import socket

from orchestrator.client.asking import joined
from orchestrator.client.blocking_client import BlockingJobClient, BlockingJobs
from orchestrator.client.errors import NoController, NoSuchJob
from orchestrator.client.jobs import Command
from orchestrator.client.opening import opened
from orchestrator.commands.command import JobCommand
from orchestrator.events.types import Answered


def sender() -> str:
    """Who sends commands from here, for the job's log."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = f"user {os.getuid()}"
    return f"{user} on {socket.gethostname()}"


def steer(address: str | None, job: str, command: JobCommand, *, wait: bool, as_json: bool = False) -> str:
    """Send a command to a job, and return what happens or has happened, in words or as JSON.

    Args:
        wait: until it is decided.

    Raises:
        JobError: there is no such cluster, service or job, its controller does not answer or refuses; or, with
            `wait`, it was not done.
    """
    with opened(address) as client:
        folder = client.view(job).folder if wait and command.ends else None
        accepted = client.send(job, command)
        return answer_text(accepted, _outcome(client, accepted, folder) if wait else None, as_json=as_json)


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


def _outcome(client: BlockingJobs, command: Command, folder: str | None) -> Answered:
    """The answer to a command.

    Args:
        folder: the job's, if the command ends the job, and with it the controller that would tell.
    """
    try:
        return client.outcome(command)
    except (NoController, NoSuchJob):
        if folder is None:
            raise
        entry = client.view(command.job, folder=folder).commands.get(command.id)
        if entry is None or entry.answer is None:
            raise
        return entry.answer


def reap_job(job: str, address: str, *, force: bool) -> str:
    """Clear what an abandoned job left: ranks, placement groups, a controller. Return in words what there was.

    Args:
        force: even if its controller answers, or may answer later.

    Raises:
        JobError: there is no such cluster, nothing of that name, or the job is at work or may be.
    """
    with joined(address) as connection:
        return BlockingJobClient(connection.address).reap(job, force=force)
