"""`freshet stop`: ends a job of a cluster."""

from __future__ import annotations

from typing import Annotated

import typer


def stop(
    job: Annotated[str, typer.Argument(help="The job's name.")],
    address: Annotated[str, typer.Option(help="The cluster, as in cluster.address.")] = "auto",
    now: Annotated[bool, typer.Option("--now", help="End at once, without a checkpoint.")] = False,
) -> None:
    """Stop a job of a running cluster after the step in flight, with a checkpoint."""
    from orchestrator.cli.jobs import stop_job

    stop_job(job, address, now=now)
