"""Runs `freshet sweep`, and says where its page lies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from orchestrator.cli.exit_codes import DONE, FAILED, INTERRUPTED
from orchestrator.spec.job_spec import load
from orchestrator.sweep.grid import cells_of
from orchestrator.sweep.sweeping import CSV_NAME, PAGE_NAME, Sweep
from planner.wording import counted


def sweep_command(
    path: Path,
    overrides: Sequence[str],
    grid: Sequence[str],
    *,
    seeds: int | None,
    beside: int,
    out: Path | None,
) -> int:
    """Run the sweep and return the exit code.

    Raises:
        JobError: something that the user can fix.
    """
    cells, spec = cells_of(grid, seeds), load(path, overrides)
    for cell in cells:
        load(path, (*overrides, *cell.overrides))  # a key that does not exist comes out before anything runs
    folder = Path(f"{spec.job.folder}-sweep") if out is None else out
    console = Console()

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    say(f"{counted(len(cells), 'job')} in {folder}")
    sweep = Sweep(path=path, overrides=tuple(overrides), cells=cells, folder=folder, say=say)
    outcomes = sweep.run(spec, beside=beside)
    say(f"table: {folder / CSV_NAME}")
    say(f"page: {folder / PAGE_NAME}")
    if sweep.interrupted:
        return INTERRUPTED
    return FAILED if any(outcome.error for outcome in outcomes) else DONE
