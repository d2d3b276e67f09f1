"""`freshet reap`: clears what an abandoned job left."""

from __future__ import annotations

from typing import Annotated

import typer


def reap(
    job: Annotated[str, typer.Argument(help="The job's name.")],
    address: Annotated[str, typer.Option(help="The cluster, as in cluster.address.")] = "auto",
    force: Annotated[bool, typer.Option("--force", help="Kill the job even if it is at work.")] = False,
) -> None:
    """Clear what an abandoned job left on a running cluster: its ranks, reservations and controller."""
    from orchestrator.cli.jobs import reap_job

    typer.echo(reap_job(job, address, force=force))
