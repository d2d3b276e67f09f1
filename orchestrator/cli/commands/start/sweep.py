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
    again goes on where it ended. Ctrl-C and SIGTERM stop the jobs that run, with checkpoints."""
    from rich.console import Console

    from orchestrator.cli.exit_codes import DONE, FAILED, INTERRUPTED
    from orchestrator.spec.job_spec import load
    from orchestrator.sweep.grid import cells_of
    from orchestrator.sweep.sweeping import CSV_NAME, PAGE_NAME, Sweep
    from planner.wording import counted

    common = tuple(overrides or ())
    cells, of_all = cells_of(grid, seeds), load(spec, common)
    for cell in cells:
        load(spec, (*common, *cell.overrides))  # a key that does not exist comes out before anything runs
    folder = Path(f"{of_all.job.folder}-sweep") if out is None else out
    console = Console()

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    say(f"{counted(len(cells), 'job')} in {folder}")
    runs = Sweep(path=spec, overrides=common, cells=cells, folder=folder, say=say)
    outcomes = runs.run(of_all, beside=beside)
    say(f"table: {folder / CSV_NAME}")
    say(f"page: {folder / PAGE_NAME}")
    if runs.interrupted:
        raise typer.Exit(INTERRUPTED)
    raise typer.Exit(FAILED if any(outcome.error for outcome in outcomes) else DONE)
