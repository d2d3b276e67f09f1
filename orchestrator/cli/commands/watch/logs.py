"""`freshet logs`: shows what a job's ranks print."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.options import Address


def logs(
    run: Annotated[str, typer.Argument(help="A job's output folder, or its name.", metavar="JOB_OR_FOLDER")],
    rank: Annotated[int | None, typer.Option(help="Only this rank's output.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on as the ranks print, until the job has ended.")
    ] = False,
    address: Address = None,
) -> None:
    """Show what each rank of a job printed, logged or warned, from the files in the job's folder: while the job trains,
    after its end, after a crash."""
    from orchestrator.cli.exit_codes import INTERRUPTED
    from orchestrator.cli.logs import logs_command

    try:
        logs_command(run, address, rank, follow=follow, show=typer.echo)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
