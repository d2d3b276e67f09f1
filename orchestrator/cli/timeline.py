"""Runs `freshet timeline`: draws a measured step of a run, and its prediction; or prints it for programs."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from orchestrator.analysis.step_memory import profile_beside
from orchestrator.client.opening import opened
from orchestrator.events.log import read_log
from orchestrator.history.folder import JobFolder
from orchestrator.history.job_view import JobView, fold
from orchestrator.pictures.forms import check_suffix, write_form
from orchestrator.report.parts import Table as Facts
from orchestrator.report.step.step_timeline import measured_step
from planner.profile import Profile
from workers.protocol.errors import JobError

SHOWN = 20
"""Newest measured steps that a message names."""


def timeline_of_run(run: str, step: int | None, out: Path | None, *, as_json: bool) -> None:
    """Print a measured step of the run in folder `run`, or write it to `out`.

    Args:
        step: unset: the newest one.
        as_json: print it as the REST interface answers it.

    Raises:
        JobError: there is no run, its log is damaged, the step was not measured, or `out` cannot be written.
    """
    _check(out, as_json)
    log = JobFolder(run).fetch_events()
    try:
        view = fold(read_log(log))
    except OSError as error:
        raise JobError(
            f"{run} holds no event log: {error.strerror or error}; name a job's output folder"
        ) from error
    except ValueError as error:
        raise JobError(str(error)) from error
    _show(run, view, profile_beside(log), step, out, as_json)


def timeline_of_job(
    job: str, address: str | None, step: int | None, out: Path | None, *, as_json: bool
) -> None:
    """The same of a running job.

    Raises:
        JobError: nothing answers at `address`, there is no such job, the step was not measured, or `out` cannot be
            written.
    """
    _check(out, as_json)
    with opened(address) as client:
        view, profile = client.view(job), client.profile(job)
    _show(f"job {job!r}", view, profile, step, out, as_json)


def _check(out: Path | None, as_json: bool) -> None:
    if out is not None and as_json:
        raise JobError("--json prints the step and --out writes a picture of it: give one of them")
    if out is not None:
        check_suffix(out, "--out")


def _show(
    run: str, view: JobView, profile: Profile | None, wanted: int | None, out: Path | None, as_json: bool
) -> None:
    if wanted is not None and view.measured and wanted not in view.measured:
        kept = ", ".join(map(str, sorted(view.measured)[-SHOWN:]))
        raise JobError(
            f"{run} holds no timeline of step {wanted}: ask for one of the measured steps, such as {kept}"
        )
    step = measured_step(view, profile, wanted) if view.measured else None
    if step is None:
        raise JobError(f"{run} holds no timeline yet: ranks report the last step's, and those of monitoring")
    if out is not None:
        write_form(out, "--out", step.forms)
        typer.echo(f"step {step.step:,}: wrote {out}")
        return
    if as_json:
        typer.echo(json.dumps(step.values()))
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
