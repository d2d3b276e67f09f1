"""`freshet checkpoint`: has a running job write a checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer


def checkpoint(
    job: Annotated[str, typer.Argument(help="The job's name.")],
    address: Annotated[str, typer.Option(help="The cluster, as in cluster.address.")] = "auto",
) -> None:
    """Have a job of a running cluster write a checkpoint after the step in flight; the job trains on."""
    from orchestrator.cli.jobs import checkpoint_job

    typer.echo(checkpoint_job(job, address))
