"""The command line: every command, in the order in which a user needs them."""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from orchestrator.cli.commands.checkpoint import checkpoint
from orchestrator.cli.commands.dashboard import dashboard
from orchestrator.cli.commands.export import export
from orchestrator.cli.commands.fault import fault
from orchestrator.cli.commands.follow import follow
from orchestrator.cli.commands.logs import logs
from orchestrator.cli.commands.move import move
from orchestrator.cli.commands.pause import pause
from orchestrator.cli.commands.plan import plan
from orchestrator.cli.commands.profile import profile
from orchestrator.cli.commands.reap import reap
from orchestrator.cli.commands.rehearse import rehearse
from orchestrator.cli.commands.report import report
from orchestrator.cli.commands.resume import resume
from orchestrator.cli.commands.schedule import schedule
from orchestrator.cli.commands.status import status
from orchestrator.cli.commands.stop import stop
from orchestrator.cli.commands.submit import submit
from orchestrator.cli.commands.timeline import timeline
from orchestrator.cli.commands.train import train
from orchestrator.cli.commands.verify import verify
from orchestrator.cli.exit_codes import USER_ERROR
from workers.protocol import JobError

app = typer.Typer(
    name="freshet",
    help="Elastic pipeline-parallel training on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (
    train,
    submit,
    plan,
    profile,
    dashboard,
    status,
    follow,
    logs,
    checkpoint,
    pause,
    resume,
    stop,
    move,
    report,
    timeline,
    export,
    verify,
    rehearse,
    fault,
    reap,
    schedule,
):
    app.command()(command)


def _show_version(asked: bool) -> None:
    if asked:
        try:
            typer.echo(f"freshet {version('freshet')}")
        except PackageNotFoundError:  # run from its source folder
            typer.echo("freshet, not installed")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Elastic pipeline-parallel training on Ray."""


def main() -> None:
    """Entry point of the console script."""
    # As `python -m` does: factories and sources by import path may be in the current folder.
    sys.path.insert(0, os.getcwd())
    try:
        app()
    except JobError as error:
        typer.echo(f"freshet: {error}", err=True)
        sys.exit(USER_ERROR)
