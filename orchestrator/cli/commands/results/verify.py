"""`freshet verify`: what a run's event log and checkpoints prove, and what is wrong with them."""

from __future__ import annotations

from typing import Annotated

import typer


def verify(
    run: Annotated[str, typer.Argument(help="A job's output folder, or its name.", metavar="JOB_OR_FOLDER")],
    head: Annotated[
        str | None,
        typer.Option(
            help="A head of the log that an earlier call printed and you noted elsewhere: the log must still hold"
            " that line.",
            metavar="SHA256",
        ),
    ] = None,
    rerun: Annotated[
        int,
        typer.Option(
            help="Compute so many steps again, from the checkpoints and from the initial weights, on one rank of this"
            " machine, and compare losses, norms and weights bit for bit.",
            metavar="K",
            min=0,
        ),
    ] = 0,
) -> None:
    """Prove from a run's files that log and checkpoints are as they were written, no step is missing or doubled, and no
    sample is used twice or skipped.

    What is not proved comes first. Exit code 0: all is proved; 3: nothing is wrong, but not all is proved; 1: something
    is wrong.
    """
    from orchestrator.cli.exit_codes import FAILED, PROVED_IN_PART
    from orchestrator.verify.verification import verify_run

    ledger, lines = verify_run(run, head, rerun, lambda text: typer.echo(text, err=True))
    for line in lines:
        typer.echo(line)
    if ledger.wrong:
        raise typer.Exit(FAILED)
    if ledger.unproved:
        raise typer.Exit(PROVED_IN_PART)
