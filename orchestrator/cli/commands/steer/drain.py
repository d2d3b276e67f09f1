"""`freshet drain`: has a running job leave a node."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.options import Address, Id, Job, Json, Wait


def drain(
    job: Job,
    node: Annotated[
        str, typer.Argument(help="The node: its id, the beginning of one, or its address.", metavar="NODE")
    ],
    deadline: Annotated[float, typer.Option(help="Seconds that the ranks have to hand over.")] = 30.0,
    wait: Wait = False,
    id: Id = None,
    as_json: Json = False,
    address: Address = None,
) -> None:
    """Have a running job leave a node, as before a preemption: its ranks there hand over their layers, and it starts
    none there until freshet undrain. Other jobs stay."""
    from orchestrator.cli.steering import sender, steer

    typer.echo(
        steer(
            address,
            lambda jobs: jobs.drain(job, node, deadline, id=id, by=sender()),
            wait=wait,
            as_json=as_json,
        )
    )
