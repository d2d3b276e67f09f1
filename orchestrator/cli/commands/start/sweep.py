"""`freshet sweep`: runs a job for each combination of some settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def sweep(
    spec: Annotated[Path, typer.Argument(help="The job's TOML file.")],
    grid: Annotated[
        list[str],
        typer.Option(
            metavar="SECTION.KEY=VALUE,VALUE...", help="A key of the spec and its values. May be repeated."
        ),
    ],
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Seeds of each setting, from 0 on; unset: the spec's own.")
    ] = None,
    beside: Annotated[int, typer.Option(min=1, help="Jobs that run side by side.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Folder of jobs, CSV and page; unset: the job's folder with -sweep.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Set a key for all jobs. May be repeated."),
    ] = None,
) -> None:
    """Train a job for each combination of some settings, and compare them on a page and in a CSV. The same command
    again goes on where it ended. Ctrl-C stops the jobs that run, with checkpoints."""
    from orchestrator.cli.sweeping import sweep_command

    code = sweep_command(spec, overrides or [], grid, seeds=seeds, beside=beside, out=out)
    raise typer.Exit(code)
