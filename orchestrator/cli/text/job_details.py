"""One job in detail, as words, a table and JSON values: `freshet status JOB`. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.table import Table

from orchestrator.analysis.job_summary import job_summary
from orchestrator.events.types import command_words
from orchestrator.history.job_view import JobView
from orchestrator.quantities import operations, percent, rate, seconds, significant
from planner.wording import counted, pipelines_text, shares_text


def details(view: JobView) -> dict[str, Any]:
    """A job in detail, as JSON values: its summary, plan, ranks, and the commands that are not decided yet."""
    plan = view.plan
    return {
        **asdict(job_summary(view)),
        "partition": None if plan is None else list(plan.layers_per_stage),
        "schedule": None if plan is None else plan.schedule,
        "shares": None if plan is None else list(plan.shares),
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
        f"{significant(found.epochs)} epochs" if found.epochs is not None else "",
        f"{operations(found.flops_per_s)}/s" if found.flops_per_s is not None else "",
        f"MFU {percent(found.mfu)}" if found.mfu is not None else "",
        f"effective training time {percent(found.effective_time_ratio)}"
        if found.effective_time_ratio is not None
        else "",
    ]
    if any(numbers):
        yield "  ".join(filter(None, numbers))
    if found.best is not None:
        target = (
            f", target after {seconds(found.time_to_target_s)}" if found.time_to_target_s is not None else ""
        )
        yield f"best validation: {found.watched} {found.best:.4f} at step {found.best_step:,}{target}"
    if found.why:
        yield f"done: {found.why}"
    if (plan := view.plan) is not None:
        counts = list(plan.layers_per_stage)
        divided = f", a step with {shares_text(plan.shares)}" if plan.shares else ""
        replicas = plan.replicas if view.course is None else view.course.at(view.step + 1).replicas
        pipelines = pipelines_text(plan.pipeline_count, replicas)
        ranks = f", {counted(plan.pipeline_ranks, 'rank')}{pipelines}" if pipelines else ""
        yield f"plan {found.plan_version}: {plan.schedule}, layers per stage {counts}{ranks}{divided}: {plan.reason}"
    if found.recoveries:
        yield (
            f"{counted(found.recoveries, 'recovery', 'recoveries')} in {seconds(found.recovery_s)},"
            f" {counted(found.steps_rerun, 'step')} run again"
        )
    for entry in view.commands.pending():
        yield f"under way: {command_words(entry.command.name)} {entry.command.arguments or ''}".rstrip()
    if view.trouble:
        yield f"trouble: {view.trouble}"
    yield f"folder: {view.folder}"


def rank_table(view: JobView) -> Table:
    """The job's ranks: stages, layers and hosts."""
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
