"""`freshet train`: runs a job to its end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.exit_codes import INTERRUPTED
from orchestrator.cli.options import GivenProfile, Overrides, Resume
from workers.protocol.errors import JobError


def train(
    spec: Annotated[Path, typer.Argument(help="The job's TOML file; docs/spec.md lists every key.")],
    overrides: Overrides = None,
    resume: Resume = False,
    profile: GivenProfile = None,
    replay: Annotated[
        Path | None,
        typer.Option(help="Freeze as this event log says, to repeat a recorded run with the same bits."),
    ] = None,
    summary: Annotated[
        Path | None, typer.Option(help="Write the run's numbers to this file, as JSON.")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Submit the job to a running cluster, and do not follow it.")
    ] = False,
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Serve the job's page meanwhile, and print its address.")
    ] = False,
) -> None:
    """Train a job to its end. Ctrl-C stops it after the step in flight, with a checkpoint; a second one at once."""
    from orchestrator.cli.training import detach_command, train_command

    try:
        if detach:
            if dashboard:
                raise JobError(
                    "--dashboard does not go with --detach: start `freshet dashboard` beside the job"
                )
            if summary is not None:
                raise JobError("--summary does not go with --detach: the run's numbers are known at its end")
            code = detach_command(spec, overrides or [], resume=resume, profile=profile, replay=replay)
        else:
            code = train_command(
                spec,
                overrides or [],
                resume=resume,
                profile=profile,
                replay=replay,
                summary=summary,
                dashboard=dashboard,
            )
    except KeyboardInterrupt:
        typer.echo("freshet: interrupted before the job was running", err=True)
        code = INTERRUPTED
    raise typer.Exit(code)
