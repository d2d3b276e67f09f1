"""`freshet status`: lists the jobs of a cluster."""

from __future__ import annotations

from typing import Annotated

import typer


def status(
    address: Annotated[str, typer.Option(help="The cluster, as in cluster.address.")] = "auto",
) -> None:
    """List the jobs of a running cluster: state, step, ranks, folder."""
    from orchestrator.cli.jobs import status_lines

    for line in status_lines(address):
        typer.echo(line)
