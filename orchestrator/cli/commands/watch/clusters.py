"""`freshet clusters`: lists the Ray clusters of this machine, or ends one of them."""

from __future__ import annotations

from typing import Annotated

import typer


def clusters(
    end: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="End this cluster's processes on this machine, and no others: ray stop ends those of all clusters.",
        ),
    ] = None,
) -> None:
    """List the Ray clusters with nodes on this machine: address, when they started, what keeps them."""
    from orchestrator.client.cluster_state import clusters_of_this_machine, end_of_cluster

    if end is not None:
        typer.echo(end_of_cluster(end))
        return
    for text in clusters_of_this_machine():
        typer.echo(text)
