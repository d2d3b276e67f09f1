"""`freshet move`: layers of a running job change ranks."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.options import Address, Id, Job, Json, Wait


def move(
    job: Job,
    layers: Annotated[str, typer.Option(help="A layer, or a run of them: 3, or 3-4.")],
    to: Annotated[
        int, typer.Option(help="Number of the rank that gets them; it has the layers before or after them.")
    ],
    wait: Wait = False,
    id: Id = None,
    as_json: Json = False,
    address: Address = None,
) -> None:
    """Move layers of a running job to another rank while it trains, as elastic.migration says: live, with the same
    bits; deferred, as DynPipe does; or stop, between two steps."""
    from orchestrator.cli.steering import move_layers

    typer.echo(move_layers(job, address, layers, to, id=id, wait=wait, as_json=as_json))
