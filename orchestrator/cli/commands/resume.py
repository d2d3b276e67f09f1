"""`freshet resume`: has a paused job train on."""

from __future__ import annotations

from typing import Annotated

import typer


def resume(
    job: Annotated[str, typer.Argument(help="The job's name.")],
    address: Annotated[str, typer.Option(help="The cluster, as in cluster.address.")] = "auto",
) -> None:
    """Have a paused job of a running cluster train on from its checkpoint, once the cluster has room for its ranks. A
    job that has ended is another matter: see freshet train --resume."""
    from orchestrator.cli.jobs import resume_job

    typer.echo(resume_job(job, address))
