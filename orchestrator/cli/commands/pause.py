"""`freshet pause`: has a job give its ranks back for a while."""

from __future__ import annotations

from typing import Annotated

import typer


def pause(
    job: Annotated[str, typer.Argument(help="The job's name.")],
    address: Annotated[str, typer.Option(help="The cluster, as in cluster.address.")] = "auto",
) -> None:
    """Pause a job of a running cluster after the step in flight, with a checkpoint. The job gives its ranks back and
    keeps its controller; freshet resume has it train on."""
    from orchestrator.cli.jobs import pause_job

    typer.echo(pause_job(job, address))
