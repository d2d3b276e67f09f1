"""`freshet reap`: clears what an abandoned job left."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.options import ClusterAddress, Job


def reap(
    job: Job,
    address: ClusterAddress = "auto",
    force: Annotated[bool, typer.Option("--force", help="Kill the job even if it is at work.")] = False,
) -> None:
    """Clear what an abandoned job left on a running cluster: its ranks, reservations and controller."""
    from orchestrator.cli.steering import reap_job

    typer.echo(reap_job(job, address, force=force))
