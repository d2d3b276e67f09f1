"""`freshet adapt`: looks into what the planner of a job that adapts was told and decided."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

adapt = typer.Typer(name="adapt", no_args_is_help=True)


@adapt.callback()
def options() -> None:
    """Repeat what the planner of a job that adapts decided."""


@adapt.command()
def replay(
    recording: Annotated[
        Path, typer.Argument(help="A planner's recording, or the folder of a job with adapt.record = true.")
    ],
) -> None:
    """Feed a planner with what a job's planner was told, and say whether it decides the same."""
    from orchestrator.cli.replaying import replay_command

    replay_command(recording)
