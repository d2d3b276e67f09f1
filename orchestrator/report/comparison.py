"""Runs beside each other: their curves in one chart each, their numbers in one table. Pure: views in, facts out."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import accumulate
from typing import Any

from orchestrator.analysis.effective_time import effective_time
from orchestrator.analysis.job_summary import job_summary, model_text
from orchestrator.analysis.throughput import throughput, throughput_unit
from orchestrator.events.reports import metric_texts
from orchestrator.history.job_view import JobView
from orchestrator.history.phase_bands import Band
from orchestrator.pictures.charts import Chart, Series, of_times
from orchestrator.quantities import operations, percent, rate, seconds, significant
from orchestrator.report.interference.interference_page import InterferencePart, interference_part
from orchestrator.report.parts import Cell, Column, Pill, Table
from orchestrator.report.run.moves import moves
from orchestrator.report.run.recovery import RecoveryPart, recovery
from orchestrator.report.run.sections import MOST_DOTS, outcome
from orchestrator.report.run.speeds import SpeedsPart, speeds
from orchestrator.report.run.what_ran import partition_text, visit_bands
from planner.wording import counted
from workers.protocol.reports import StepReport

Named = Sequence[tuple[str, JobView]]
"""Runs by the names that a page gives them."""
MOST_SETTINGS = 60
LONGEST = 80
"""Most characters of a setting that are shown."""
NAMES = ("job.name", "job.output")
"""Settings that tell runs apart, and say nothing of how they differ."""
AXES = {"step": "steps", "tokens": "tokens", "time": "time trained"}
"""Horizontal axes that the curves can have, in words."""


@dataclass(frozen=True)
class Comparison:
    """Runs beside each other."""

    charts: tuple[Chart, ...]
    numbers: Table
    differences: Table | None
    """Settings of the specs that differ; None: they are all alike."""
    rehearsals: tuple[tuple[str, RecoveryPart], ...]
    """Recovery of the runs that were rehearsals."""
    interference: InterferencePart | None
    """Comparison of jobs that a neighbour disturbed, each with another policy, once all have ended."""
    adapted: tuple[tuple[str, SpeedsPart, Table | None], ...]
    """Rank speeds and layer moves of the runs that measure their ranks' speeds."""


def comparison(runs: Named, axis: str = "step") -> Comparison:
    """Compare `runs`, of which there is at least one.

    Args:
        axis: what the curves are drawn over, one of `AXES`.
    """
    along = _Along.of(runs, axis)
    return Comparison(
        charts=tuple(
            chart
            for chart in (
                _chart(along, "Loss", "mean over the batch", lambda report: report.loss),
                _validation(along),
                _chart(
                    along, "Throughput", throughput_unit(runs[0][1]), throughput, format=rate, from_zero=True
                ),
                _chart(
                    along,
                    "Gradient norm",
                    "global, before clipping",
                    lambda report: report.grad_norm,
                    logarithmic=True,
                ),
                of_times(
                    _chart(
                        along,
                        "Step time",
                        "s",
                        lambda report: report.step_s,
                        from_zero=True,
                        bands=next(filter(None, (visit_bands(view) for _, view in runs)), ())
                        if axis == "step"
                        else (),
                    )
                ),
            )
            if chart.series
        ),
        numbers=_numbers(runs),
        differences=_differences(runs),
        rehearsals=tuple(
            (name, part)
            for name, view in runs
            if view.recovery.rehearsed is not None and (part := recovery(view)) is not None
        ),
        interference=interference_part([view for _, view in runs]),
        adapted=tuple((name, part, moves(view)) for name, view in runs if (part := speeds(view)) is not None),
    )


@dataclass(frozen=True)
class _Along:
    """Runs, and where their steps are on the axis."""

    runs: Named
    axis: str
    """Name of the axis in a chart."""
    places: tuple[Callable[[int], float], ...]
    """Per run: step -> its place."""

    @staticmethod
    def of(runs: Named, axis: str) -> _Along:
        places = tuple(_places(view, axis) for _, view in runs)
        if axis == "tokens":
            return _Along(runs, throughput_unit(runs[0][1]).removesuffix("/s"), places)
        if axis == "step":
            return _Along(runs, axis, places)
        longest_s = max(place(view.step) for place, (_, view) in zip(places, runs, strict=True))
        unit, factor = ("minute", 1 / 60) if longest_s > 300 else ("second", 1.0)
        return _Along(runs, unit, tuple(partial(_scaled, place, factor) for place in places))


def _scaled(place: Callable[[int], float], factor: float, step: int) -> float:
    return factor * place(step)


def _places(view: JobView, axis: str) -> Callable[[int], float]:
    """Step -> the tokens, or the seconds, of the steps up to it that stand: what a step that was run again took the
    first time is not among them, nor what recoveries, pauses and the time between starts did."""
    if axis == "step":
        return float
    stand = sorted(
        (each for each in view.recovery.commits if each.voided_by is None), key=lambda each: each.step
    )
    steps = [each.step for each in stand]
    sums = list(accumulate(each.samples if axis == "tokens" else each.step_s for each in stand))

    def place(step: int) -> float:
        index = bisect_right(steps, step) - 1
        return float(sums[index]) if index >= 0 else 0.0

    return place


def _chart(
    along: _Along,
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
                points=tuple((place(step), value(view.steps[step])) for step in sorted(view.steps)),
            )
            for (name, view), place in zip(along.runs, along.places, strict=True)
            if view.steps
        ),
        format=format,
        from_zero=from_zero,
        logarithmic=logarithmic,
        bands=bands,
        axis=along.axis,
    )


def _validation(along: _Along) -> Chart:
    """The validation losses of the runs that have some."""
    return Chart(
        title="Validation loss",
        unit="mean over the validation set",
        series=tuple(
            Series(
                name=name,
                points=tuple((place(step), view.validations[step].loss) for step in sorted(view.validations)),
                dots=len(view.validations) <= MOST_DOTS,
            )
            for (name, view), place in zip(along.runs, along.places, strict=True)
            if view.validations
        ),
        format=significant,
        axis=along.axis,
    )


def _differences(runs: Named) -> Table | None:
    """A row per setting of the resolved specs in which the runs differ, a column per run."""
    specs = [dict(_settings(view.spec)) for _, view in runs]
    keys = dict.fromkeys(key for spec in specs for key in spec)
    rows = [(key, *(spec.get(key, "–") for spec in specs)) for key in keys]
    differing = [row for row in rows if len({*row[1:]}) > 1 and row[0] not in NAMES]
    if not differing:
        return None
    left = len(differing) - MOST_SETTINGS
    return Table(
        label="Settings that differ",
        columns=(Column("Setting"), *(Column(name, "text") for name, _ in runs)),
        rows=tuple(differing[:MOST_SETTINGS]),
        more=f"{counted(left, 'more setting')} that differ." if left > 0 else "",
    )


def _settings(section: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """(key with its sections, value as text) of each setting."""
    for name, value in section.items():
        key = f"{above}{name}"
        if isinstance(value, Mapping):
            yield from _settings(value, f"{key}.")
        else:
            text = "–" if value is None else json.dumps(value, default=str, ensure_ascii=False)
            yield key, text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


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
    newest = view.validations[max(view.validations)] if view.validations else None
    plan = view.plan
    return {
        "Outcome": Pill(words, tone),
        "Model": model_text(view.spec.get("model", {})) or "–",
        "Steps": f"{summary.step:,} of {summary.last_step:,}",
        "Loss": _or(summary.loss, "{:.4f}".format),
        "Validation loss": _or(newest and newest.loss, "{:.4f}".format),
        "Metrics": ", ".join(metric_texts(newest.metrics)) if newest and newest.metrics else "–",
        "Best validation": f"{summary.watched} {summary.best:.4f}, step {summary.best_step:,}"
        if summary.best is not None
        else "–",
        "Time to target": _or(summary.time_to_target_s, seconds),
        "Step time, newest steps": _or(summary.step_s, seconds),
        "Throughput": _or(summary.tokens_per_s, lambda per_s: f"{rate(per_s)} {summary.per_s}"),
        "Samples per hour": _or(summary.samples_per_hour, rate),
        "Epochs": _or(summary.epochs, significant),
        "Compute": _or(summary.flops_per_s, lambda per_s: f"{operations(per_s)}/s"),
        "MFU": _or(summary.mfu, percent),
        "Schedule": plan.schedule if plan is not None else "–",
        "Ranks": str(plan.world_size) if plan is not None else "–",
        "Cut": partition_text(plan) if plan is not None else "–",
        "Effective training time": _or(ratio, percent),
        "Recoveries": f"{summary.recoveries:,}, {seconds(summary.recovery_s)}" if summary.recoveries else "0",
        "Steps run again": f"{summary.steps_rerun:,}",
        "Took": seconds(view.duration_s) + (f" in {counted(view.runs, 'start')}" if view.runs > 1 else ""),
        "Started": datetime.fromtimestamp(view.started_s, UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _or(value: float | None, text: Callable[[float], str]) -> str:
    return "–" if value is None else text(value)
