"""Runs the commands that show where running jobs stand: `freshet jobs` and `status`, over Ray or REST."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from orchestrator.analysis.job_summary import JobSummary
from orchestrator.cli.text.job_details import detail_lines, details, rank_table
from orchestrator.client.blocking_client import BlockingJobs
from orchestrator.client.errors import ControllerSilent, NoController, NoSuchJob
from orchestrator.client.jobs import POLL_S
from orchestrator.client.opening import opened
from orchestrator.events.types import named_floats
from orchestrator.history.job_view import JobView
from orchestrator.quantities import percent, rate
from planner.wording import counted

WIDTH = 120
"""Columns of tables, if no terminal sets them."""
WITHOUT_VIEW = ("silent", "abandoned", "submitting", "refused")
"""States of jobs of which no more is known."""


def jobs_command(address: str | None, *, as_json: bool, show: Callable[[str], None]) -> None:
    """Show all jobs at `address`.

    Raises:
        JobError: nothing answers there.
    """
    with opened(address) as client:
        found = client.summaries()
    if as_json:
        show(json.dumps({"jobs": [asdict(each) for each in found]}))
    elif not found:
        show("no job is running")
    else:
        console = wide_console()
        console.print(_table(found))
        for each in found:
            if each.trouble:
                show(f"{each.job}: {each.trouble}")


def _table(found: tuple[JobSummary, ...]) -> Table:
    table = Table("job", "state", "step", "loss", "speed", "ranks", "effective", "recoveries", box=None)
    for each in found:
        spares = f" + {each.spares}" if each.spares else ""
        table.add_row(
            each.job,
            each.state,
            f"{each.step:,}/{each.last_step:,}" if each.last_step else "",
            "" if each.loss is None else f"{each.loss:.4f}",
            "" if each.tokens_per_s is None else f"{rate(each.tokens_per_s)} {each.per_s}",
            f"{each.ranks}{spares}",
            "" if each.effective_time_ratio is None else percent(each.effective_time_ratio),
            str(each.recoveries),
        )
    return table


def status_command(
    job: str | None, address: str | None, *, as_json: bool, show: Callable[[str], None]
) -> None:
    """Show `job` in detail, or a line per job.

    Raises:
        JobError: nothing answers at `address`, there is no such job, or its controller does not answer.
    """
    if job is None:
        if as_json:
            jobs_command(address, as_json=True, show=show)
            return
        for line in status_lines(address):
            show(line)
        return
    with opened(address) as client:
        view = client.view(job)
    if as_json:
        show(json.dumps(named_floats(details(view))))
        return
    for line in detail_lines(view):
        show(line)
    if view.outcome is None and view.ranks.alive:
        wide_console().print(rank_table(view))


def status_lines(address: str | None) -> Iterator[str]:
    """A line per job at `address`.

    Raises:
        JobError: nothing answers there.
    """
    with opened(address) as client:
        found = client.summaries()
        for each in found:
            yield _line(client, each)
        if not found:
            yield "no job is running"


def _line(client: BlockingJobs, known: JobSummary) -> str:
    if known.state not in WITHOUT_VIEW:
        try:
            return status_line(known.job, client.view(known.job, timeout_s=POLL_S))
        except (ControllerSilent, NoController, NoSuchJob) as error:
            return f"{known.job}: {known.state}; {error}"
    word = "" if known.state == "silent" else f"{known.state}, "
    return f"{known.job}: {word}{known.trouble}".removesuffix(", ")


def status_line(job: str, view: JobView) -> str:
    """The state of `job` in a line."""
    alive = sorted(view.ranks.alive)
    ranks = f"ranks {', '.join(map(str, alive))}, " if alive and view.outcome is None else ""
    if view.ranks.placing and view.outcome is None:
        ranks += f"{counted(len(view.ranks.placing), 'rank')} starting or without resources, "
    trouble = f"; {view.trouble}" if view.trouble else ""
    return f"{job}: {view.state}, step {view.step} of {view.last_step}, {ranks}{view.folder}{trouble}"


def wide_console() -> Console:
    """A console for tables, wide enough in a pipe."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    return console
