"""Runs `freshet logs`: finds a job's folder and prints its ranks' output, until the job's end with --follow."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from orchestrator.client.errors import ControllerSilent, ServiceUnreachable
from orchestrator.client.opening import address_or_default, opened
from orchestrator.client.rank_logs import JobLogs, ranks_with_output
from orchestrator.history.folder import JobFolder
from orchestrator.history.folder_view import view_in
from orchestrator.verify.verification import find_folder
from workers.protocol.errors import JobError

LOOK_EVERY_S = 0.5
"""Seconds between checks for new lines."""


def logs_command(
    run: str, address: str | None, rank: int | None, *, follow: bool, show: Callable[[str], None]
) -> None:
    """Show what the ranks of `run`, a job's folder or its name, printed.

    Args:
        rank: only this rank's output.
        follow: continue until the job has ended.
        show: receives one line at a time.

    Raises:
        JobError: there is no such job or rank, or nothing of its output is on this machine.
        KeyboardInterrupt: a signal came while following.
    """
    output = folder_of(run, address)
    logs = JobLogs(output, rank)
    logs.check()

    def show_fresh() -> None:
        several = rank is None and len(ranks_with_output(output)) > 1
        for number, line in logs.fresh():
            show(f"rank {number}: {line}" if several else line)

    # Check for the end first, so that everything printed before it is shown.
    while follow and not _ended(output):
        show_fresh()
        time.sleep(LOOK_EVERY_S)
    show_fresh()
    for _, line in logs.rest():
        show(line)


def folder_of(run: str, address: str | None) -> str:
    """The folder of `run`, which is a folder, a name in `runs/`, or a running job at `address`.

    Raises:
        JobError: there is none.
    """
    with suppress(JobError):
        return find_folder(run)
    try:
        with opened(address) as client:
            return client.view(run).folder
    except (ControllerSilent, ServiceUnreachable):
        raise
    except JobError as error:
        raise JobError(
            f"there is no folder {run}, nor runs/{run}, and no job {run!r} is running at"
            f" {address_or_default(address)}: name a job's output folder"
        ) from error


def _ended(output: str) -> bool:
    return view_in(JobFolder(output)).outcome is not None
