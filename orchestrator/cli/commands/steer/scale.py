"""`freshet scale`: gives a running job more or fewer ranks."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.options import Address, Id, Job, Json, Wait


def scale(
    job: Job,
    ranks: Annotated[int | None, typer.Option(help="Ranks of each of the job's pipelines.")] = None,
    spares: Annotated[int | None, typer.Option(help="Idle ranks that replace lost ones.")] = None,
    wait: Wait = False,
    id: Id = None,
    as_json: Json = False,
    address: Address = None,
) -> None:
    """Give a running job another number of ranks or spares from now on, with the same bits."""
    from orchestrator.cli.steering import sender, steer
    from workers.protocol import JobError

    if ranks is None and spares is None:
        raise JobError("scale to what? Give --ranks, --spares or both")
    typer.echo(
        steer(
            address,
            lambda jobs: jobs.scale(job, ranks=ranks, spares=spares, id=id, by=sender()),
            wait=wait,
            as_json=as_json,
        )
    )
