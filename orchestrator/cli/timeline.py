"""Runs `freshet timeline`: draws a measured step of a run, and its prediction."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from orchestrator.analysis.step_memory import profile_beside
from orchestrator.events.folder import JobFolder
from orchestrator.events.log import read_log
from orchestrator.history.job_view import fold
from orchestrator.pictures.forms import check_suffix, write_form
from orchestrator.report.parts import Table as Facts
from orchestrator.report.step_timeline import measured_step
from workers.protocol import JobError


def timeline_command(run: str, out: Path | None) -> None:
    """Print the newest measured step of the run in folder `run`, or write it to `out`.

    Raises:
        JobError: there is no run, its log is damaged, no step was measured, or `out` cannot be written.
    """
    if out is not None:
        check_suffix(out, "--out")
    log = JobFolder(run).fetch_events()
    try:
        step = measured_step(fold(read_log(log)), profile_beside(log))
    except OSError as error:
        raise JobError(
            f"{run} holds no event log: {error.strerror or error}; name a job's output folder"
        ) from error
    except ValueError as error:
        raise JobError(str(error)) from error
    if step is None:
        raise JobError(f"{run} holds no timeline yet: ranks report the last step's, and those of monitoring")
    if out is not None:
        write_form(out, "--out", step.forms)
        return
    console = Console(highlight=False)
    console.print(f"step {step.step:,}, {step.title}: {step.summary}")
    console.print(step.text(console.width, markup=True))
    if step.idle is not None:
        console.print(_as_text(step.idle))
        console.print(step.idle.more, markup=False)


def _as_text(facts: Facts) -> Table:
    table = Table(title=facts.label, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for column in facts.columns:
        table.add_column(column.name, justify="right")
    for row in facts.rows:
        table.add_row(*map(str, row))
    return table
