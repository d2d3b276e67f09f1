"""`freshet submit`: sends a job to a cluster, with the user's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.options import Overrides, Resume


def submit(
    spec: Annotated[Path, typer.Argument(help="The job's TOML file, in the working directory.")],
    address: Annotated[
        str,
        typer.Option(
            help="URL of the cluster's Ray dashboard, such as http://HOST:8265, or of a Freshet service."
        ),
    ] = "auto",
    overrides: Overrides = None,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            help="Show the job's log to its end, or its events if a service has it; exit with its code.",
        ),
    ] = False,
    resume: Resume = False,
    working_dir: Annotated[
        Path, typer.Option(help="The folder that the cluster gets a copy of: spec, user code, small data.")
    ] = Path("."),
    name: Annotated[
        str | None, typer.Option(help="Name of the job, in place of the spec's job.name.")
    ] = None,
) -> None:
    """Submit a job to a Ray cluster, as ray job submit does: this machine sends its folder and may then leave. With
    --follow, Ctrl-C only ends following, and the job goes on."""
    from orchestrator.cli.submitting import submit_command

    raise typer.Exit(
        submit_command(
            spec,
            address,
            overrides or [],
            follow=follow,
            resume=resume,
            working_dir=working_dir,
            name=name,
        )
    )
