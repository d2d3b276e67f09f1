"""Rank speeds, and the decisions on them, in `report.html` and on a job's page."""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.analysis.decided_plans import OVERTAKEN, DecidedPlan, decided_plans
from orchestrator.history.job_view import JobView
from orchestrator.pictures.charts import Chart, Series
from orchestrator.quantities import deviation, seconds, significant
from orchestrator.report.parts import Cell, Column, Explained, Table
from orchestrator.report.run.moves import ways_text
from orchestrator.report.run.what_ran import plan_changes, visit_bands
from planner.wording import link_rate

MOST_ROWS = 30
MEASURED = (
    "Measured: the median step with the plan at the speeds for which it was predicted. Steps after a change of speed do"
    f" not count: “{OVERTAKEN}” where there were no others."
)


@dataclass(frozen=True)
class SpeedsPart:
    """The section."""

    chart: Chart
    decisions: Table | None
    links: Table | None = None
    """Links that are slow now."""


def speeds(run: JobView) -> SpeedsPart | None:
    """The slowest and the median rank over the steps, and the decisions; None for a job that does not measure them."""
    known = run.adapt.speeds
    if not known:
        return None
    shown = [*known, replace(known[-1], step=max(run.step, known[-1].step))]
    chart = Chart(
        title="Slowdown of the ranks",
        unit="measured over expected time",
        series=(
            Series(
                name="slowest",
                points=tuple((each.step, each.slowest) for each in shown),
                stepped=True,
            ),
            Series(name="median", points=tuple((each.step, each.median) for each in shown), stepped=True),
        ),
        format=significant,
        from_zero=True,
        bands=visit_bands(run),
        changes=plan_changes(run),
        emulated=run.emulated,
    )
    return SpeedsPart(chart, _decisions(run), _links(run))


def _links(run: JobView) -> Table | None:
    slow = run.adapt.links
    if not slow:
        return None
    return Table(
        label="Links that are slower than before the job",
        columns=(
            Column("From rank", "number"),
            Column("To rank", "number"),
            Column("Rate"),
            Column("Latency"),
        ),
        rows=tuple(
            (
                str(link.source),
                str(link.target),
                link_rate(link.bytes_per_s),
                seconds(link.latency_s),
            )
            for link in slow[:MOST_ROWS]
        ),
    )


def _decisions(run: JobView) -> Table | None:
    plans = decided_plans(run)[-MOST_ROWS:]
    if not plans:
        return None
    return Table(
        label="Decisions on speeds, newest first",
        columns=(
            Column("After step", "number"),
            Column("Decision", "text"),
            Column("Best cut"),
            Column("Layers moved", "text"),
            Column("Predicted without", "number"),
            Column("Predicted with it", "number"),
            Column("Measured", "number"),
            Column("Over predicted", "number"),
        ),
        rows=tuple(_row(plan) for plan in reversed(plans)),
        more=MEASURED,
    )


def _row(plan: DecidedPlan) -> tuple[Cell, ...]:
    """The row of decisions that are together, the newest with its numbers."""
    first, newest = plan.decisions[0], plan.decisions[-1]
    times = f", {len(plan.decisions)} times" if len(plan.decisions) > 1 else ""
    moved = "; ".join(ways_text(move) for move in plan.moves)
    return (
        f"{first.step:,}" + (f"–{newest.step:,}" if times else ""),
        Explained(newest.verdict + times, newest.reason),
        " + ".join(map(str, newest.layers)) if newest.layers else "–",
        moved or "–",
        seconds(newest.now_s),
        seconds(newest.then_s),
        plan.unmeasured or "–" if plan.measured_s is None else seconds(plan.measured_s),
        "–" if plan.off_by is None else deviation(plan.off_by),
    )
