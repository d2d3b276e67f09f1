"""Runs the commands that show running jobs: `freshet jobs`, `status` and `events`, over Ray or REST."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from orchestrator.analysis.job_summary import JobSummary, job_summary
from orchestrator.cli.event_lines import event_line
from orchestrator.client.blocking_client import BlockingJobs
from orchestrator.client.errors import ControllerSilent, NoController, NoSuchJob
from orchestrator.client.jobs import POLL_S, opened
from orchestrator.events.types import named_floats
from orchestrator.history.job_view import JobView
from orchestrator.quantities import percent, rate, seconds
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
    table = Table("job", "state", "step", "loss", "speed", "ranks", "effective", "losses of ranks", box=None)
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
        wide_console().print(_ranks(view))


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


def details(view: JobView) -> dict[str, Any]:
    """A job in detail, as JSON values: its summary, plan, ranks, and the commands that are not decided yet."""
    plan = view.plan
    return {
        **asdict(job_summary(view)),
        "partition": None if plan is None else list(plan.layers_per_stage),
        "schedule": None if plan is None else plan.schedule,
        "reason": None if plan is None else plan.reason,
        "predicted_step_s": None if plan is None else plan.predicted_step_s,
        "nodes": [
            {
                "rank": rank,
                "place": _place(view, rank),
                "stages": _stages(view, rank),
                "host": view.ranks.hosts.get(rank),
                "node": view.ranks.nodes.get(rank),
                "leaving": rank in view.ranks.going,
            }
            for rank in sorted(view.ranks.alive)
        ],
        "pending": [
            {"id": entry.command.id, "name": entry.command.name, "arguments": entry.command.arguments}
            for entry in view.commands.pending()
        ],
    }


def detail_lines(view: JobView) -> Iterator[str]:
    """The job in words, without its ranks."""
    found = job_summary(view)
    yield f"{view.job}: {view.state}, step {view.step:,} of {view.last_step:,}"
    numbers = [
        f"loss {found.loss:.4f}" if found.loss is not None else "",
        f"{rate(found.tokens_per_s)} {found.per_s}" if found.tokens_per_s is not None else "",
        f"step time {seconds(found.step_s)}" if found.step_s is not None else "",
        f"effective training time {percent(found.effective_time_ratio)}"
        if found.effective_time_ratio is not None
        else "",
    ]
    if any(numbers):
        yield "  ".join(filter(None, numbers))
    if (plan := view.plan) is not None:
        counts = list(plan.layers_per_stage)
        yield f"plan {found.plan_version}: {plan.schedule}, layers per stage {counts}: {plan.reason}"
    if found.recoveries:
        yield (
            f"{counted(found.recoveries, 'recovery', 'recoveries')} from losses of ranks, {seconds(found.recovery_s)},"
            f" {counted(found.steps_rerun, 'step')} run again"
        )
    for entry in view.commands.pending():
        yield f"under way: {entry.command.name} {entry.command.arguments or ''}".rstrip()
    if view.trouble:
        yield f"trouble: {view.trouble}"
    yield f"folder: {view.folder}"


def _ranks(view: JobView) -> Table:
    table = Table("rank", "stages", "layers", "host", "", box=None)
    for rank in sorted(view.ranks.alive):
        stages = _stages(view, rank)
        spans = [view.plan.layers[stage] for stage in stages] if view.plan is not None else []
        marks = ["leaving"] if rank in view.ranks.going else ["spare"] if rank in view.ranks.spares else []
        table.add_row(
            str(rank),
            " ".join(map(str, stages)),
            " ".join(f"{first}-{stop - 1}" for first, stop in spans),
            view.ranks.hosts.get(rank, ""),
            " ".join(marks),
        )
    return table


def _place(view: JobView, rank: int) -> int | None:
    return view.ranks.members.index(rank) if rank in view.ranks.members else None


def _stages(view: JobView, rank: int) -> list[int]:
    place, plan = _place(view, rank), view.plan
    if place is None or plan is None:
        return []
    return [stage for stage, of in enumerate(plan.stage_ranks) if of == plan.place(place).rank]


def events_command(
    job: str,
    address: str | None,
    *,
    after: int,
    follow: bool,
    as_json: bool,
    show: Callable[[str], None],
) -> None:
    """Show the events of the job's newest start after the first `after`.

    Args:
        follow: go on as they happen, until the job has ended.

    Raises:
        JobError: nothing answers at `address`, there is no such job, or its controller does not answer.
        KeyboardInterrupt: a signal came while following.
    """
    with opened(address) as client:
        over = False
        while not over:
            page = client.page(job, after, POLL_S if follow else 0.0)
            if page.missed:
                text = f"{page.missed:,} events are no longer kept here: {job}'s log has them"
                show(json.dumps({"missed": page.missed}) if as_json else text)
            first = page.next - len(page.records) + 1
            for number, record in enumerate(page.records, first):
                show(record.to_json() if as_json else event_line(number, record))
            after = page.next
            over = page.over or not (follow or page.records or page.missed)


def wide_console() -> Console:
    """A console for tables, wide enough in a pipe."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    return console
