"""The command line: every command, in the order in which a user needs them."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from orchestrator.cli.commands.results.adapt import adapt
from orchestrator.cli.commands.results.export import export
from orchestrator.cli.commands.results.report import report
from orchestrator.cli.commands.results.timeline import timeline
from orchestrator.cli.commands.results.verify import verify
from orchestrator.cli.commands.start.interference import interference
from orchestrator.cli.commands.start.plan import plan
from orchestrator.cli.commands.start.profile import profile
from orchestrator.cli.commands.start.rehearse import rehearse
from orchestrator.cli.commands.start.schedule import schedule
from orchestrator.cli.commands.start.submit import submit
from orchestrator.cli.commands.start.sweep import sweep
from orchestrator.cli.commands.start.train import train
from orchestrator.cli.commands.steer.derived import derived
from orchestrator.cli.commands.steer.fault import fault
from orchestrator.cli.commands.steer.reap import reap
from orchestrator.cli.commands.watch.clusters import clusters
from orchestrator.cli.commands.watch.dashboard import dashboard
from orchestrator.cli.commands.watch.events import events
from orchestrator.cli.commands.watch.follow import follow
from orchestrator.cli.commands.watch.jobs import jobs
from orchestrator.cli.commands.watch.logs import logs
from orchestrator.cli.commands.watch.status import status
from orchestrator.cli.exit_codes import USER_ERROR
from orchestrator.commands.table import COMMANDS
from workers.protocol.errors import JobError

app = typer.Typer(
    name="freshet",
    help="Elastic pipeline-parallel training on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
ROOMS = {
    "Start": (train, submit, plan, profile, schedule, rehearse, sweep),
    "Watch": (dashboard, jobs, status, events, follow, logs, clusters),
    "Steer": (*(derived(kind) for kind in COMMANDS if kind.derived), fault, reap),
    "Results": (report, timeline, export, verify),
}
"""Heading of the help -> its commands."""
for heading, commands in ROOMS.items():
    for command in commands:
        app.command(rich_help_panel=heading)(command)
app.add_typer(interference, rich_help_panel="Start")
app.add_typer(adapt, rich_help_panel="Results")


def _show_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import PackageNotFoundError, version

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
