"""Runs beside each other: their curves in one chart each, their numbers in one table. Pure: views in, facts out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orchestrator.analysis.effective_time import effective_time
from orchestrator.analysis.job_summary import job_summary
from orchestrator.analysis.throughput import throughput, throughput_unit
from orchestrator.history.job_view import JobView
from orchestrator.history.phase_bands import Band
from orchestrator.pictures.charts import Chart, Series, of_times
from orchestrator.quantities import percent, rate, seconds, significant
from orchestrator.report.interference.interference_page import InterferencePart, interference_part
from orchestrator.report.parts import Cell, Column, Pill, Table
from orchestrator.report.run.moves import moves
from orchestrator.report.run.recovery import RecoveryPart, recovery
from orchestrator.report.run.sections import outcome
from orchestrator.report.run.speeds import SpeedsPart, speeds
from orchestrator.report.run.what_ran import model_text, partition_text, visit_bands
from workers.protocol import StepReport

Named = Sequence[tuple[str, JobView]]
"""Runs by the names that a page gives them."""


@dataclass(frozen=True)
class Comparison:
    """Runs beside each other."""

    charts: tuple[Chart, ...]
    numbers: Table
    rehearsals: tuple[tuple[str, RecoveryPart], ...]
    """Of the runs that were rehearsals."""
    interference: InterferencePart | None
    """Of jobs that a neighbour disturbed, each with another policy, once all have ended."""
    adapted: tuple[tuple[str, SpeedsPart, Table | None], ...]
    """Of the runs that measure their ranks' speeds: these, and the layers that moved."""


def comparison(runs: Named) -> Comparison:
    """Compare `runs`, of which there is at least one."""
    return Comparison(
        charts=tuple(
            chart
            for chart in (
                _chart(runs, "Loss", "mean over the batch", lambda report: report.loss),
                _chart(
                    runs, "Throughput", throughput_unit(runs[0][1]), throughput, format=rate, from_zero=True
                ),
                _chart(
                    runs,
                    "Gradient norm",
                    "global, before clipping",
                    lambda report: report.grad_norm,
                    logarithmic=True,
                ),
                of_times(
                    _chart(
                        runs,
                        "Step time",
                        "s",
                        lambda report: report.step_s,
                        from_zero=True,
                        bands=next(filter(None, (visit_bands(view) for _, view in runs)), ()),
                    )
                ),
            )
            if chart.series
        ),
        numbers=_numbers(runs),
        rehearsals=tuple(
            (name, part)
            for name, view in runs
            if view.recovery.rehearsed is not None and (part := recovery(view)) is not None
        ),
        interference=interference_part([view for _, view in runs]),
        adapted=tuple((name, part, moves(view)) for name, view in runs if (part := speeds(view)) is not None),
    )


def _chart(
    runs: Named,
    title: str,
    unit: str,
    value: Callable[[StepReport], float],
    *,
    format: Callable[[float], str] = significant,
    from_zero: bool = False,
    logarithmic: bool = False,
    bands: tuple[Band, ...] = (),
) -> Chart:
    return Chart(
        title=title,
        unit=unit,
        series=tuple(
            Series(
                name=name,
                points=tuple((step, value(view.steps[step])) for step in sorted(view.steps)),
            )
            for name, view in runs
            if view.steps
        ),
        format=format,
        from_zero=from_zero,
        logarithmic=logarithmic,
        bands=bands,
    )


def _numbers(runs: Named) -> Table:
    """A row per figure, a column per run."""
    columns = [_column(view) for _, view in runs]
    return Table(
        label="Numbers of the runs",
        columns=(Column("Figure"), *(Column(name, "number") for name, _ in runs)),
        rows=tuple((figure, *(column[figure] for column in columns)) for figure in columns[0]),
    )


def _column(view: JobView) -> dict[str, Cell]:
    summary = job_summary(view, lost=True)
    tone, words = outcome(view)
    rehearsed = effective_time(view.recovery, emulated=view.emulated)
    ratio = rehearsed.ratio if rehearsed is not None else summary.effective_time_ratio
    validation = view.validations[max(view.validations)].loss if view.validations else None
    plan = view.plan
    return {
        "Outcome": Pill(words, tone),
        "Model": model_text(view.spec.get("model", {})) or "–",
        "Steps": f"{summary.step:,} of {summary.last_step:,}",
        "Loss": _or(summary.loss, "{:.4f}".format),
        "Validation loss": _or(validation, "{:.4f}".format),
        "Step time, newest steps": _or(summary.step_s, seconds),
        "Throughput": _or(summary.tokens_per_s, lambda per_s: f"{rate(per_s)} {summary.per_s}"),
        "Schedule": plan.schedule if plan is not None else "–",
        "Ranks": str(plan.world_size) if plan is not None else "–",
        "Cut": partition_text(plan) if plan is not None else "–",
        "Effective training time": _or(ratio, percent),
        "Recoveries": f"{summary.recoveries:,}, {seconds(summary.recovery_s)}" if summary.recoveries else "0",
        "Steps run again": f"{summary.steps_rerun:,}",
        "Took": seconds(view.ended_s - view.started_s),
    }


def _or(value: float | None, text: Callable[[float], str]) -> str:
    return "–" if value is None else text(value)
