"""Runs `freshet submit`: what it prints, and the exit code of a job that it follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import typer

from orchestrator.cli.exit_codes import DONE, FAILED, INTERRUPTED
from orchestrator.cli.job_events import follow_events
from orchestrator.client.job_package import job_package
from orchestrator.client.opening import opened
from orchestrator.client.page_address import page_address
from orchestrator.client.ray_submission import RayCluster
from orchestrator.client.submit import SubmittedJob
from orchestrator.spec.job_spec import load
from workers.protocol.errors import JobError

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


ANSWER_S = 5.0


def answers_as_service(address: str) -> bool:
    """Whether a Freshet service answers at the URL `address`. Sends no token: a service refuses in its own words, and
    Ray's dashboard, which has URLs too, knows no such path."""
    if not address.startswith(("http://", "https://")):
        return False
    try:
        answer = httpx.get(f"{address.rstrip('/')}/api/v1/jobs", timeout=ANSWER_S, trust_env=False)
    except httpx.HTTPError:
        return False
    return answer.headers.get("content-type", "").startswith("application/problem+json")


def submit_over_rest(
    spec_path: Path, overrides: Sequence[str], address: str, *, resume: bool, say: Callable[[str], None]
) -> SubmittedJob:
    """Submit the job of the spec at `spec_path`, and return once a controller has accepted it. The service measures,
    plans and starts it; files that the spec names are those of the service's machine.

    Args:
        address: URL of the service.
        resume: continue from the newest checkpoint in the job's folder.
        say: receives what happens, in words.

    Raises:
        JobError: the spec has an unknown key or a wrong value, or the service refuses it or does not answer.
    """
    spec = load(spec_path, overrides)
    say(f"submitting {spec.job.name} to {address}: it is measured and planned there")
    with opened(address) as client:
        job = client.submit(spec, resume=resume)
    say(f"{job.name} trains in {job.folder}: {address.rstrip('/')}/jobs/{job.name}")
    return job
