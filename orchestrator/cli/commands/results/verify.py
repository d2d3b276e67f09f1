"""`freshet verify`: what a run's event log and checkpoints prove, and what is wrong with them."""

from __future__ import annotations

from typing import Annotated

import typer


def verify(
    run: Annotated[str, typer.Argument(help="A job's output folder, or its name.", metavar="JOB_OR_FOLDER")],
) -> None:
    """Prove from the log that no step is missing or doubled, no sample is used twice or skipped, and no checkpoint is
    altered."""
    from orchestrator.cli.exit_codes import FAILED
    from orchestrator.verify.verification import verify_run

    ledger, lines = verify_run(run)
    for line in lines:
        typer.echo(line)
    if ledger.wrong:
        raise typer.Exit(FAILED)
