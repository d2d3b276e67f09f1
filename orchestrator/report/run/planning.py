"""Planning in `report.html`: the plan's predictions and its alternatives."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from orchestrator.history.job_view import JobView
from orchestrator.quantities import percent, seconds, significant
from orchestrator.report.parts import Cell, Column, Pill, Table, Tile, tile
from planner.plan import Plan
from planner.search.alternatives import Alternative
from planner.wording import counted
from workers.protocol.reports import StepReport

MOST_ROWS = 20


@dataclass(frozen=True)
class PlanningPart:
    """The plan's predictions and its alternatives."""

    partition: str
    tiles: tuple[Tile, ...]
    considered: Table | None


def planning(run: JobView) -> PlanningPart | None:
    """The part; None if the plan was not simulated and the run sampled nothing for the next plan."""
    plan = run.plan
    if plan is None or (plan.predicted_step_s is None and not run.alternatives and not run.curvature.samples):
        return None
    return PlanningPart(plan.partition or "", _tiles(run, plan), considered(plan, run.alternatives))


def _tiles(run: JobView, plan: Plan) -> tuple[Tile, ...]:
    entries: list[Tile] = []
    if plan.predicted_step_s is not None:
        times = [step.step_s for step in _unfrozen(run)]
        detail = "with nothing frozen"
        if times:
            measured_s = median(times)
            detail += f"; measured {seconds(measured_s)}, ratio {plan.predicted_step_s / measured_s:.3f}"
        entries.append(tile("Predicted step", seconds(plan.predicted_step_s), detail))
    if plan.predicted_bubble is not None:
        entries.append(tile("Predicted bubble", percent(plan.predicted_bubble), "mean over ranks"))
    if (estimates := run.curvature.estimates()) is not None:
        detail = f"DynPipe, from {counted(estimates.samples, 'sample')} of the running job"
        entries.append(tile("Smoothness L", significant(estimates.smoothness), detail))
        entries.append(tile("Second moment ξ²", significant(estimates.second_moment), detail))
    return tuple(entries)


def _unfrozen(run: JobView) -> list[StepReport]:
    """Steps with nothing frozen, except the job's first, which warms caches."""
    return [
        step
        for number, step in run.steps.items()
        if number > 1 and step.step_s > 0 and number not in run.freeze.steps
    ]


def considered(plan: Plan, alternatives: tuple[Alternative, ...]) -> Table | None:
    """The chosen plan first, then each program's own choice for its shape, then plans of other shapes."""
    if not alternatives:
        return None
    ordered = sorted(alternatives, key=lambda each: each.order(plan))
    left = len(ordered) - MOST_ROWS
    return Table(
        label="Plans considered",
        columns=(
            Column("Cut by"),
            Column("Schedule"),
            Column("Ranks", "number"),
            Column("Microbatches", "number"),
            Column("Layers per stage", "text"),
            Column("Simulated step", "number"),
            Column("Verdict", "text"),
        ),
        rows=tuple(_row(plan, each) for each in ordered[:MOST_ROWS]),
        more=f"{counted(left, 'more plan')} considered, in the event log." if left > 0 else "",
    )


def _row(plan: Plan, each: Alternative) -> tuple[Cell, ...]:
    return (
        each.name or "–",
        each.schedule,
        str(each.ranks),
        str(each.microbatches),
        "–" if each.layers is None else " + ".join(str(stop - first) for first, stop in each.layers),
        "–" if each.predicted_step_s is None else seconds(each.predicted_step_s),
        Pill("taken", "good") if each.is_of(plan) else each.why_not,
    )
