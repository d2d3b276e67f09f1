"""How fast the ranks were, and what was decided on that, in `report.html` and on a job's page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from orchestrator.events.wording import verdict
from orchestrator.history.adapt_record import Decided
from orchestrator.history.job_view import JobView
from orchestrator.pictures.charts import Chart, Series
from orchestrator.quantities import seconds, significant
from orchestrator.report.moves import ways_text
from orchestrator.report.parts import Cell, Column, Explained, Table
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
    runs = _runs(run.adapt.decisions)[-MOST_ROWS:]
    if not runs:
        return None
    rows = [_row(run, decided, _end(run, runs[number:])) for number, decided in enumerate(runs)]
    return Table(
        label="Decisions on speeds, newest first",
        columns=(
            Column("After step", "number"),
            Column("Decision", "text"),
            Column("Best cut"),
            Column("Layers moved", "text"),
            Column("Predicted without", "number"),
            Column("Predicted with it", "number"),
            Column("Measured after", "number"),
        ),
        rows=tuple(reversed(rows)),
    )


def _runs(decisions: Sequence[Decided]) -> list[list[Decided]]:
    """The decisions, oldest first; those in a row that keep the cut with the same best cut are together."""
    runs: list[list[Decided]] = []
    for each in decisions:
        before = runs[-1][-1].event if runs else None
        if before and not each.event.moves and not before.moves and before.layers == each.event.layers:
            runs[-1].append(each)
        else:
            runs.append([each])
    return runs


def _end(run: JobView, runs: Sequence[list[Decided]]) -> int:
    """The last step of the first of `runs`: of a move, that before the next move; otherwise that before the next
    decision."""
    moves = runs[0][-1].event.moves
    later = [each[0].event.step for each in runs[1:] if each[-1].event.moves or not moves]
    return later[0] if later else run.step


def _row(run: JobView, decided: list[Decided], end: int) -> tuple[Cell, ...]:
    """The row of decisions that are together, the newest with its numbers."""
    first, newest = decided[0].event, decided[-1].event
    times = f", {len(decided)} times" if len(decided) > 1 else ""
    return (
        f"{first.step:,}" + (f"–{newest.step:,}" if times else ""),
        Explained(verdict(newest) + times, newest.reason),
        " + ".join(map(str, newest.layers)) if newest.layers else "–",
        _moved(run, first.step, end) if newest.moves else "–",
        seconds(newest.now_s),
        seconds(newest.then_s),
        _measured(run, decided[0], end),
    )


def _moved(run: JobView, begin: int, end: int) -> str:
    """The layers that moved between two steps, each with its way."""
    moves = [ways_text(move) for move in run.moves if begin < move.step <= end]
    return "; ".join(moves) if moves else "–"


def _measured(run: JobView, decided: Decided, end: int) -> str:
    """The median step from the decision, or from the move that it led to, until the next one."""
    begin = decided.event.step
    if decided.event.moves:
        begin = min((move.step for move in run.moves if begin < move.step <= end), default=begin)
    begin += 1
    took = [run.steps[step].step_s for step in range(begin, end + 1)[:MEASURED_STEPS] if step in run.steps]
    return seconds(median(took)) if took else "–"
