"""`freshet resume`: has a paused job train on."""

from __future__ import annotations

import typer

from orchestrator.cli.options import Address, Id, Job, Json, Wait


def resume(
    job: Job, wait: Wait = False, id: Id = None, as_json: Json = False, address: Address = None
) -> None:
    """Have a paused job train on from its checkpoint, once the cluster has room for its ranks. A job that has ended is
    another matter: see freshet train --resume."""
    from orchestrator.cli.steering import resume_job

    typer.echo(resume_job(job, address, id=id, wait=wait, as_json=as_json))
