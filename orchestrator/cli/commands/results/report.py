"""`freshet report`: writes the page about a run from its event log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[str, typer.Argument(help="A job's output folder.")],
    out: Annotated[
        Path | None, typer.Option(help="The HTML file to write; unset: report.html beside the event log.")
    ] = None,
) -> None:
    """Write the report of a run from its event log alone: while the job trains, after its end, after a crash."""
    from orchestrator.cli.reporting import report_command

    typer.echo(f"report: {report_command(run, out)}")
