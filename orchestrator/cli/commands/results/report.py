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
    from orchestrator.history.folder import JobFolder
    from orchestrator.report.page import write_report
    from workers.protocol.errors import JobError

    log = JobFolder(run).fetch_events()
    if not log.exists():
        raise JobError(f"{run} holds no event log: name a job's output folder")
    try:
        typer.echo(f"report: {write_report(log, out, run)}")
    except ValueError as error:
        raise JobError(str(error)) from error
    except OSError as error:
        raise JobError(f"cannot write {out or 'the report'}: {error.strerror or error}") from error
