"""The shorter sections of `report.html`: each is a function from a run to facts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median

from orchestrator.analysis.achieved import compute, epochs_done, time_to_target_s
from orchestrator.analysis.freeze_steps import freeze_steps
from orchestrator.analysis.job_summary import model_text
from orchestrator.analysis.metric_curves import metric_curves
from orchestrator.analysis.throughput import recent_steps, throughput, throughput_unit
from orchestrator.events.types import Failed, Finished
from orchestrator.history.job_view import JobView
from orchestrator.pictures.charts import MOST_BINS, MOST_POINTS, Chart, Point, Series, of_times
from orchestrator.quantities import operations, percent, rate, seconds, significant, size
from orchestrator.report.parts import Cell, Column, Pill, ReportNote, Table, Tile, Tone, tile
from orchestrator.report.run.what_ran import device_text, plan_changes, visit_bands
from planner.wording import counted
from workers.protocol.reports import CheckpointReport, StepReport

MOST_NOTES = 20
MOST_DOTS = 60
"""Most validations of a run that are drawn as dots too."""


@dataclass(frozen=True)
class Header:
    """The top of the page."""

    job: str
    tone: Tone
    outcome: str
    summary: str
    """Model, plan, device, start and duration, in one line."""


@dataclass(frozen=True)
class TrainingCurves:
    """The curves over all steps."""

    how: str
    """Thinning of a long run, in words; empty for a short one."""
    charts: tuple[Chart, ...]


def header(run: JobView) -> Header:
    """The job's name, how it ended, and what ran in one line."""
    when = datetime.fromtimestamp(run.started_s, UTC).strftime("%-d %B %Y, %H:%M UTC")
    parts = [model_text(run.spec.get("model", {}))]
    if run.plan is not None:
        parts += [counted(run.plan.world_size, "rank"), run.plan.schedule]
    parts += [
        device_text(run),
        when,
        f"{'took' if run.outcome else 'so far'} {seconds(run.duration_s)}"
        + (f" in {counted(run.runs, 'start')}" if run.runs > 1 else ""),
    ]
    return Header(run.job, *outcome(run), " · ".join(part for part in parts if part))


def outcome(run: JobView) -> tuple[Tone, str]:
    """(tone, words) for how the run ended."""
    match run.outcome:
        case Finished(stopped=True, step=step):
            return "warn", f"stopped at step {step:,}"
        case Finished(reached=reached) if reached:
            return "good", f"finished with {reached}"
        case Finished(plateau=plateau) if plateau:
            return "good", f"finished: {plateau}"
        case Finished():
            return "good", "finished"
        case Failed():
            return "bad", "failed"
    return "warn", "not finished"


def notes(run: JobView) -> tuple[ReportNote, ...]:
    """Warnings, errors, and a note if the figures are modelled."""
    lines: list[tuple[str, str]] = []
    if run.emulated:
        lines.append(
            (
                "warning",
                "Emulated device: times, rates and the timeline on this page come from modelled layer times,"
                " not from real arithmetic.",
            )
        )
    lines += [(note.level, note.text) for note in run.notes]
    skipped = [report.step for report in run.steps.values() if report.skipped]
    if skipped:
        listed = ", ".join(f"{step:,}" for step in skipped[:10]) + (", …" if len(skipped) > 10 else "")
        lines.append(
            (
                "warning",
                f"{counted(len(skipped), 'step')} skipped, no weight was changed:"
                f" the gradient norm was not finite (step {listed}).",
            )
        )
    left_out = len(lines) - MOST_NOTES
    if left_out > 0:
        lines = [*lines[:MOST_NOTES], ("note", f"{left_out:,} more in the event log.")]
    tones: dict[str, Tone] = {"note": "good", "warning": "warn", "error": "bad"}
    return tuple(ReportNote(tones[level], level.capitalize(), text) for level, text in lines)


def tiles(run: JobView) -> tuple[Tile, ...]:
    """The figures that summarize the run."""
    steps = list(run.steps.values())
    if not steps:
        return ()
    emulated = ", emulated" if run.emulated else ""
    entries = [("Steps", f"{steps[-1].step:,}", f"of {run.last_step:,}" if run.last_step else "")]
    losses = [report.loss for report in steps if math.isfinite(report.loss)]
    if losses:
        entries.append(("Training loss", f"{losses[-1]:.4f}", f"from {losses[0]:.4f}"))
    if run.validations:
        newest = max(run.validations.values(), key=lambda report: report.step)
        entries.append(("Validation loss", f"{newest.loss:.4f}", f"at step {newest.step:,}"))
        entries.extend(
            (name.capitalize(), f"{value:.4f}", f"at step {newest.step:,}")
            for name, value in newest.metrics.items()
        )
    rates = [throughput(report) for report in steps if report.step_s > 0]
    if rates:
        entries.append(("Throughput", rate(median(rates)), f"{throughput_unit(run)}, median{emulated}"))
    entries.extend(_use(run))
    times = [report.step_s for report in steps]
    entries.append(("Step time", seconds(median(times)), f"median{emulated}"))
    bubbles = [report.bubble for report in steps]
    entries.append(("Bubble", percent(median(bubbles)), "median idle share"))
    if run.first_step_s is not None:
        first = seconds(run.first_step_s - run.started_s)
        entries.append(("First step after", first, "from submission"))
    return tuple(tile(*entry) for entry in entries)


def _use(run: JobView) -> Iterator[tuple[str, str, str]]:
    """Figures of passes over the data, of the devices' use, and of the target."""
    if (epochs := epochs_done(run)) is not None:
        yield "Epochs", significant(epochs), f"of {counted(run.train_samples, 'sample')}"
    used = compute(run, recent_steps(run))
    if used is not None:
        emulated = ", emulated" if run.emulated else ""
        yield "Samples per hour", rate(used.samples_per_hour), f"newest steps{emulated}"
    if used is not None and used.flops_per_s is not None:
        of_peak = f"MFU {percent(used.mfu)}" if used.mfu is not None else "of the model's passes"
        yield "Compute", f"{operations(used.flops_per_s)}/s", of_peak
    if (to_target_s := time_to_target_s(run)) is not None:
        yield "Time to target", seconds(to_target_s), str(run.spec["job"]["stop_at"])


def training(run: JobView) -> TrainingCurves | None:
    """Loss, throughput, gradient norm and step time over the steps."""
    steps = list(run.steps.values())
    if not steps:
        return None
    skipped = tuple(report.step for report in steps if report.skipped)
    changes = plan_changes(run)

    drawn = (
        Chart(
            title="Loss",
            unit="mean over the batch",
            series=_losses(run, steps),
            format=significant,
            marks=skipped,
            mark_name="skipped step",
            changes=changes,
        ),
        Chart(
            title="Throughput",
            unit=throughput_unit(run),
            series=(_by_step("throughput", steps, throughput),),
            format=rate,
            from_zero=True,
            bands=run.phases,
            changes=changes,
            emulated=run.emulated,
        ),
        Chart(
            title="Gradient norm",
            unit="global, before clipping",
            series=(_by_step("gradient norm", steps, lambda report: report.grad_norm),),
            format=significant,
            logarithmic=True,
            marks=skipped,
            mark_name="skipped step",
            changes=changes,
        ),
        of_times(
            Chart(
                title="Step time",
                unit="s",
                series=_step_times(run, steps),
                format=significant,
                from_zero=True,
                bands=run.phases or visit_bands(run),
                changes=changes,
                emulated=run.emulated,
            )
        ),
        *_metrics(run, changes),
    )
    how = ""
    if len(steps) > MOST_POINTS:
        together = round((steps[-1].step - steps[0].step + 1) / MOST_BINS)
        how = f"line: median of each {counted(together, 'step')}; band: lowest to highest"
    return TrainingCurves(how, drawn)


def _by_step(name: str, steps: Sequence[StepReport], value: Callable[[StepReport], float]) -> Series:
    return Series(name=name, points=tuple((report.step, value(report)) for report in steps))


def _losses(run: JobView, steps: Sequence[StepReport]) -> tuple[Series, ...]:
    """The training loss, and the validation loss where the run validates."""
    training = _by_step("training", steps, lambda report: report.loss)
    if not run.validations:
        return (training,)
    points = tuple((step, run.validations[step].loss) for step in sorted(run.validations))
    return training, Series(name="validation", points=points, dots=len(points) <= MOST_DOTS)


def _step_times(run: JobView, steps: Sequence[StepReport]) -> tuple[Series, ...]:
    """The measured step time, and the predicted one where there is a prediction."""
    measured = _by_step("measured", steps, lambda report: report.step_s)
    predicted = tuple(
        (row.step, row.predicted_step_s) for row in freeze_steps(run) if row.predicted_step_s is not None
    )
    planned = () if predicted else _planned(run, steps[-1].step)
    if not (predicted or planned):
        return (measured,)
    return measured, Series(name="predicted", points=predicted or planned, stepped=bool(planned))


def _metrics(run: JobView, changes: tuple[int, ...]) -> Iterator[Chart]:
    """A chart of each metric of the validations."""
    for name, curve in metric_curves(run).items():
        yield Chart(
            title=name.capitalize(),
            unit="of the held-out samples",
            series=(Series(name=name, points=tuple(curve.items()), dots=len(curve) <= MOST_DOTS),),
            format=significant,
            changes=changes,
        )


def _planned(run: JobView, newest: int) -> tuple[Point, ...]:
    """The predicted step of each plan of a job that freezes nothing, from the step that it was issued after."""
    points = {
        max(decision.step, 1): decision.plan.predicted_step_s
        for decision in run.decisions
        if decision.plan.predicted_step_s is not None
    }
    if points and not run.phases:
        first = min(points)
        return (*sorted(points.items()), (newest, points[max(points)])) if first < newest else ()
    return ()


def checkpoints(run: JobView) -> Table | None:
    """Every checkpoint, finished or failed, newest first."""
    if not run.checkpoints:
        return None
    return Table(
        label="Checkpoints",
        columns=(
            Column("Step", "number"),
            Column("State"),
            Column("Written", "number"),
            Column("Took", "number"),
            Column("Where", "text"),
        ),
        rows=tuple(_checkpoint_row(report) for report in reversed(run.checkpoints)),
    )


def _checkpoint_row(report: CheckpointReport) -> tuple[Cell, ...]:
    if report.error is None:
        state, where, written = Pill("saved", "good"), report.path, size(report.bytes)
    else:
        state, where, written = Pill("failed", "bad"), report.error, "–"
    return f"{report.step:,}", state, written, seconds(report.seconds), where


def spec(run: JobView) -> str:
    """The resolved spec."""
    return json.dumps(run.spec, indent=2, ensure_ascii=False) if run.spec else ""


def footer(run: JobView) -> str:
    """The sources of the page's figures."""
    runs = f" over {run.runs} runs" if run.runs > 1 else ""
    return (
        f"Made from events.jsonl: {counted(len(run.steps), 'step')}{runs}; the memory of a step from profile.json,"
        " where there is one."
    )
