"""Runs `freshet submit`: what it prints, and the exit code of a job that it follows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from orchestrator.cli.exit_codes import DONE, FAILED, INTERRUPTED
from orchestrator.cli.job_events import follow_events
from orchestrator.cli.submitting_over_rest import answers_as_service, submit_over_rest
from orchestrator.client.job_package import job_package
from orchestrator.client.page_address import page_address
from orchestrator.client.ray_submission import RayCluster
from workers.protocol import JobError

if TYPE_CHECKING:
    from ray.job_submission import JobDetails

HERE = Path(".")
"""The working directory if none is given."""


def submit_command(
    path: Path,
    address: str,
    overrides: Sequence[str],
    *,
    follow: bool,
    resume: bool,
    working_dir: Path,
    name: str | None,
) -> int:
    """Submit the job and return the exit code: its own if it is followed.

    Raises:
        JobError: something that the user can fix.
    """
    if answers_as_service(address):
        if working_dir != HERE:
            raise JobError(
                f"--working-dir {working_dir}: a service takes no folder, and reads the files that a spec names on its"
                " own machine. Leave --working-dir out, or name the cluster's Ray dashboard with --address"
            )
        return _submit_to_service(path, address, overrides, follow=follow, resume=resume, name=name)
    package = job_package(path, overrides, working_dir=working_dir, resume=resume, name=name)
    cluster = RayCluster(address, lambda text: typer.echo(text, err=True))
    id = cluster.submit(package)
    there = f"{id} --address {cluster.address}"
    typer.echo(f"job {package.name} is submitted to {cluster.address} as {id}")
    typer.echo(f"follow: ray job logs --follow {there}")
    typer.echo(f"stop, with a checkpoint: ray job stop {there}")
    if (page := page_address(address)) is not None:
        typer.echo(f"page: {page}")
    if not follow:
        return DONE
    try:
        return exit_code(cluster.follow(id, show))
    except KeyboardInterrupt:
        typer.echo(
            f"freshet: no longer following {id}, which goes on. Follow it with ray job logs --follow {there}, stop it"
            f" with ray job stop {there}",
            err=True,
        )
        return INTERRUPTED


def _submit_to_service(
    path: Path, address: str, overrides: Sequence[str], *, follow: bool, resume: bool, name: str | None
) -> int:
    named = [*overrides, *([f"job.name={name}"] if name is not None else [])]
    job = submit_over_rest(path, named, address, resume=resume, say=typer.echo)
    there = f"{job.name} --address {address}"
    typer.echo(f"stop, with a checkpoint: freshet cancel {there}")
    if not follow:
        typer.echo(f"follow: freshet events --follow {there}")
        return DONE
    try:
        return follow_events(job.name, address, typer.echo)
    except KeyboardInterrupt:
        typer.echo(
            f"freshet: no longer following {job.name}, which goes on. Follow it with freshet events --follow {there},"
            f" stop it with freshet cancel {there}",
            err=True,
        )
        return INTERRUPTED


def show(text: str) -> None:
    """Print a piece of a job's log."""
    typer.echo(text, nl=False)


def exit_code(end: JobDetails) -> int:
    """The exit code for a job that Ray says has ended so; says why if its log does not."""
    if end.status == "SUCCEEDED":
        return DONE
    if end.status == "STOPPED":
        return INTERRUPTED
    if end.driver_exit_code is None:  # it never ran
        typer.echo(f"freshet: {end.message}", err=True)
    return end.driver_exit_code or FAILED
