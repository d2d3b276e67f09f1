"""`freshet cancel`: ends a running job."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.options import Address, Id, Job, Json, Wait


def cancel(
    job: Job,
    now: Annotated[bool, typer.Option("--now", help="End at once, without a checkpoint.")] = False,
    wait: Wait = False,
    id: Id = None,
    as_json: Json = False,
    address: Address = None,
) -> None:
    """End a running job after the step in flight, with a checkpoint from which freshet train --resume goes on."""
    from orchestrator.cli.steering import cancel_job

    typer.echo(cancel_job(job, address, now=now, id=id, wait=wait, as_json=as_json))
