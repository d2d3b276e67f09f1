"""`freshet checkpoint`: has a running job write a checkpoint."""

from __future__ import annotations

import typer

from orchestrator.cli.options import Address, Id, Job, Json, Wait


def checkpoint(
    job: Job, wait: Wait = True, id: Id = None, as_json: Json = False, address: Address = None
) -> None:
    """Have a running job write a checkpoint after the step in flight; the job trains on."""
    from orchestrator.cli.steering import checkpoint_job

    typer.echo(checkpoint_job(job, address, id=id, wait=wait, as_json=as_json))
