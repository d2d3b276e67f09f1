"""`freshet pause`: has a job give its ranks back for a while."""

from __future__ import annotations

import typer

from orchestrator.cli.options import Address, Id, Job, Json, Wait


def pause(job: Job, wait: Wait = True, id: Id = None, as_json: Json = False, address: Address = None) -> None:
    """Pause a running job after the step in flight, with a checkpoint. The job gives its ranks back and keeps its
    controller; freshet resume has it train on."""
    from orchestrator.cli.steering import pause_job

    typer.echo(pause_job(job, address, id=id, wait=wait, as_json=as_json))
