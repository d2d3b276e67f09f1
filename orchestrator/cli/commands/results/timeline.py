"""`freshet timeline`: shows a measured step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.options import Address, Json
from workers.protocol.errors import JobError


def timeline(
    run: Annotated[str | None, typer.Argument(help="A job's output folder.")] = None,
    job: Annotated[str | None, typer.Option(help="In place of a folder, this running job.")] = None,
    step: Annotated[
        int | None, typer.Option(min=1, help="A measured step; unset: the newest one.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write it to this file: .svg, .html, or .json for Perfetto.")
    ] = None,
    as_json: Json = False,
    address: Address = None,
) -> None:
    """Show a measured step of a run or of a running job, and its prediction where there is one.

    --json prints each rank's spans (rank, action, start_s, end_s) in the shape of the REST interface's answer.
    """
    from orchestrator.cli.timeline import timeline_of_job, timeline_of_run

    if (run is None) == (job is None):
        raise JobError("whose timeline? Give a job's output folder, or --job and the name of a running job")
    if job is not None:
        timeline_of_job(job, address, step, out, as_json=as_json)
    elif run is not None:
        timeline_of_run(run, step, out, as_json=as_json)
