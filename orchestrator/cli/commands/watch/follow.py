"""`freshet follow`: watches a running job as the driver that submitted it does."""

from __future__ import annotations

import typer

from orchestrator.cli.options import ClusterAddress, Job


def follow(
    job: Job,
    address: ClusterAddress = "auto",
) -> None:
    """Follow a running job from now on, as freshet train does: its lines, the report at its end, the exit code. Ctrl-C
    only stops following, and the job goes on; to end it, use freshet cancel."""
    from orchestrator.cli.exit_codes import INTERRUPTED
    from orchestrator.cli.training import follow_command

    try:
        code = follow_command(job, address)
    except KeyboardInterrupt:
        typer.echo(
            f"freshet: no longer following {job}, which goes on; end it with freshet cancel {job}", err=True
        )
        code = INTERRUPTED
    raise typer.Exit(code)
