"""`freshet undrain`: has a running job use a node again that it was asked to leave."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.options import Address, Id, Job, Json, Wait


def undrain(
    job: Job,
    node: Annotated[
        str,
        typer.Argument(
            help="The drained node: its id, the beginning of one, or its address.", metavar="NODE"
        ),
    ],
    wait: Wait = False,
    id: Id = None,
    as_json: Json = False,
    address: Address = None,
) -> None:
    """Have a running job use a node again that freshet drain had it leave."""
    from orchestrator.cli.steering import sender, steer

    typer.echo(
        steer(
            address,
            lambda jobs: jobs.undrain(job, node, id=id, by=sender()),
            wait=wait,
            as_json=as_json,
        )
    )
