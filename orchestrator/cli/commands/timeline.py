"""`freshet timeline`: shows a measured step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def timeline(
    run: Annotated[str, typer.Argument(help="A job's output folder.")],
    out: Annotated[
        Path | None, typer.Option(help="Write it to this file: .svg, .html, or .json for Perfetto.")
    ] = None,
) -> None:
    """Show the newest measured step of a run, and its prediction where there is one."""
    from orchestrator.cli.timeline import timeline_command

    timeline_command(run, out)
