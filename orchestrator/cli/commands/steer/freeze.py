"""`freshet freeze`: changes how much of a running job's backward passes is left out."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.options import Address, Id, Job, Json, Wait


def freeze(
    job: Job,
    method: Annotated[
        str | None, typer.Option(help="As freeze.method in a spec; none turns freezing off.")
    ] = None,
    r_max: Annotated[
        float | None,
        typer.Option(
            "--r-max", help="Largest mean share of a stage's weight gradients to leave out, 0 to 1."
        ),
    ] = None,
    wait: Wait = False,
    id: Id = None,
    as_json: Json = False,
    address: Address = None,
) -> None:
    """Change what a running job freezes, from a commit on. The change is in the event log, and freshet train --replay
    repeats it."""
    from orchestrator.cli.steering import sender, steer
    from workers.protocol import JobError

    if method is None and r_max is None:
        raise JobError("change what? Give --method, --r-max or both")
    typer.echo(
        steer(
            address,
            lambda jobs: jobs.freeze(job, method=method, r_max=r_max, id=id, by=sender()),
            wait=wait,
            as_json=as_json,
        )
    )
