"""`freshet profile`: measures what a job costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.options import Overrides


def profile(
    spec: Annotated[Path, typer.Argument(help="The job's TOML file.")],
    out: Annotated[Path | None, typer.Option(help="Write the profile to this file, as JSON.")] = None,
    overrides: Overrides = None,
) -> None:
    """Measure what every layer, link and commit of a job costs, with the job's own ranks. Trains nothing."""
    from orchestrator.cli.profile import profile_command

    profile_command(spec, overrides or [], out=out)
