"""How fast the ranks were, and what was decided on that, in `report.html` and on a job's page."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

from orchestrator.history.adapt_record import Decided
from orchestrator.history.job_view import JobView
from orchestrator.pictures.charts import Chart, Series
from orchestrator.quantities import seconds, significant
from orchestrator.report.parts import Column, Explained, Table
from orchestrator.report.what_ran import plan_changes, visit_bands

MOST_ROWS = 30
MEASURED_STEPS = 50
"""Most steps of which a plan's measured time is the median."""


@dataclass(frozen=True)
class SpeedsPart:
    """The section."""

    chart: Chart
    decisions: Table | None


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
    return SpeedsPart(chart, _decisions(run))


def _decisions(run: JobView) -> Table | None:
    decided = run.adapt.decisions[-MOST_ROWS:]
    if not decided:
        return None
    ends = [each.event.step for each in decided[1:]] + [run.step]
    rows = [
        (
            f"{each.event.step:,}",
            Explained("layers move" if each.event.moves else "the cut stays", each.event.reason),
            " + ".join(map(str, each.event.layers)) if each.event.layers else "–",
            seconds(each.event.now_s),
            seconds(each.event.then_s),
            _measured(run, each, end),
        )
        for each, end in zip(decided, ends, strict=True)
    ]
    return Table(
        label="Decisions on speeds, newest first",
        columns=(
            Column("After step", "number"),
            Column("Decision", "text"),
            Column("Best cut"),
            Column("Predicted without", "number"),
            Column("Predicted with it", "number"),
            Column("Measured after", "number"),
        ),
        rows=tuple(reversed(rows)),
    )


def _measured(run: JobView, decided: Decided, end: int) -> str:
    """The median step from the decision, or from the move that it led to, until the next one."""
    begin = decided.event.step
    if decided.event.moves:
        begin = min((move.step for move in run.moves if begin <= move.step <= end), default=begin)
    begin += 1
    took = [run.steps[step].step_s for step in range(begin, end + 1)[:MEASURED_STEPS] if step in run.steps]
    return seconds(median(took)) if took else "–"
