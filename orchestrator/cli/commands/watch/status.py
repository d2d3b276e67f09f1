"""`freshet status`: says where a job stands."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.options import Address, Json


def status(
    job: Annotated[str | None, typer.Argument(help="The job's name; unset: a line for each job.")] = None,
    as_json: Json = False,
    address: Address = None,
) -> None:
    """Say where a job stands: its numbers, its plan and why, its ranks with their layers and nodes; or a line for each
    job with its state, step, ranks and folder."""
    from orchestrator.cli.jobs import status_command

    status_command(job, address, as_json=as_json, show=typer.echo)
