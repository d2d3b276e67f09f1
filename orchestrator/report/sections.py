"""The sections of `report.html`, each a function from a run to markup: empty if there is nothing to show."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from datetime import UTC, datetime
from html import escape
from statistics import median

from orchestrator.analysis.freeze_steps import freeze_steps
from orchestrator.events.types import Failed, Finished
from orchestrator.history.job_view import JobView
from orchestrator.pictures.charts import MOST_BINS, MOST_POINTS, Chart, Series
from orchestrator.quantities import counted, percent, rate, seconds, significant, size
from orchestrator.report.facts import device_text, model_text
from orchestrator.report.parts import figure, tile
from workers.protocol import CheckpointReport, StepReport

MOST_NOTES = 20


def header(run: JobView) -> str:
    """The job's name, how it ended, and what ran in one line."""
    tone, status = outcome(run)
    pill = f'<span class="pill {tone}">{escape(status)}</span>'
    when = datetime.fromtimestamp(run.started_s, UTC).strftime("%-d %B %Y, %H:%M UTC")
    parts = [model_text(run.spec.get("model", {}))]
    if run.plan is not None:
        parts += [counted(run.plan.world_size, "rank"), run.plan.schedule]
    parts += [device_text(run), when, f"took {seconds(run.ended_s - run.started_s)}"]
    return (
        '<header><p class="eyebrow">Freshet training report</p>'
        f'<div class="title"><h1>{escape(run.job)}</h1>{pill}</div>'
        f'<p class="lede">{escape(" · ".join(part for part in parts if part))}</p></header>'
    )


def outcome(run: JobView) -> tuple[str, str]:
    """(tone, words) for how the run ended."""
    match run.outcome:
        case Finished(stopped=True, step=step):
            return "warn", f"stopped at step {step:,}"
        case Finished():
            return "good", "finished"
        case Failed():
            return "bad", "failed"
    return "warn", "not finished"


def notes(run: JobView) -> str:
    """Warnings, errors, and whether the figures are modelled."""
    lines = []
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
    if not lines:
        return ""
    left_out = len(lines) - MOST_NOTES
    if left_out > 0:
        lines = [*lines[:MOST_NOTES], ("note", f"{left_out:,} more in the event log.")]
    tones = {"note": "good", "warning": "warn", "error": "bad"}
    items = "".join(
        f'<li class="{tones[level]}"><b>{level.capitalize()}</b>{escape(text)}</li>' for level, text in lines
    )
    return f'<ul class="notes" aria-label="Notes">{items}</ul>'


def tiles(run: JobView) -> str:
    """The figures that sum the run up."""
    steps = list(run.steps.values())
    if not steps:
        return ""
    target = run.spec.get("job", {}).get("steps")
    emulated = ", emulated" if run.emulated else ""
    entries = [("Steps", f"{steps[-1].step:,}", f"of {target:,}" if isinstance(target, int) else "")]
    losses = [report.loss for report in steps if math.isfinite(report.loss)]
    if losses:
        entries.append(("Training loss", f"{losses[-1]:.4f}", f"from {losses[0]:.4f}"))
    if run.validations:
        newest = max(run.validations.values(), key=lambda report: report.step)
        entries.append(("Validation loss", f"{newest.loss:.4f}", f"at step {newest.step:,}"))
    rates = [throughput(report) for report in steps if report.step_s > 0]
    if rates:
        entries.append(("Throughput", rate(median(rates)), f"{throughput_unit(run)}, median{emulated}"))
    times = [report.step_s for report in steps]
    entries.append(("Step time", seconds(median(times)), f"median{emulated}"))
    bubbles = [report.bubble for report in steps]
    entries.append(("Bubble", percent(median(bubbles)), "median idle share"))
    if run.first_step_s is not None:
        first = seconds(run.first_step_s - run.started_s)
        entries.append(("First step after", first, "from submission"))
    items = "".join(tile(name, figure, detail) for name, figure, detail in entries)
    return f'<dl class="tiles">{items}</dl>'


def throughput(report: StepReport) -> float:
    """Tokens per second, samples per second where there are no tokens."""
    return (report.tokens or report.samples) / report.step_s if report.step_s > 0 else math.nan


def throughput_unit(run: JobView) -> str:
    return "tokens/s" if any(report.tokens for report in run.steps.values()) else "samples/s"


def charts(run: JobView) -> str:
    """Loss, throughput, gradient norm and step time over the steps."""
    steps = list(run.steps.values())
    if not steps:
        return ""
    skipped = tuple(report.step for report in steps if report.skipped)

    def series(name: str, value: Callable[[StepReport], float]) -> Series:
        return Series(name=name, points=tuple((report.step, value(report)) for report in steps))

    losses = [series("training", lambda report: report.loss)]
    if run.validations:
        points = tuple((step, run.validations[step].loss) for step in sorted(run.validations))
        losses.append(Series(name="validation", points=points, dots=len(points) <= 60))
    in_ms = median(report.step_s for report in steps) < 1
    factor, time_unit = (1e3, "ms") if in_ms else (1.0, "s")
    times = [series("measured", lambda report: report.step_s * factor)]
    foretold = tuple(
        (row.step, row.predicted_step_s * factor)
        for row in freeze_steps(run)
        if row.predicted_step_s is not None
    )
    if foretold:
        times.append(Series(name="predicted", points=foretold))
    drawn = [
        Chart(
            title="Loss",
            unit="mean over the batch",
            series=tuple(losses),
            format=significant,
            marks=skipped,
            mark_name="skipped step",
        ),
        Chart(
            title="Throughput",
            unit=throughput_unit(run),
            series=(series("throughput", throughput),),
            format=rate,
            from_zero=True,
            bands=run.phases,
        ),
        Chart(
            title="Gradient norm",
            unit="global, before clipping",
            series=(series("gradient norm", lambda report: report.grad_norm),),
            format=significant,
            logarithmic=True,
            marks=skipped,
            mark_name="skipped step",
        ),
        Chart(
            title="Step time",
            unit=time_unit,
            series=tuple(times),
            format=significant,
            from_zero=True,
            bands=run.phases,
        ),
    ]
    timed = {"Throughput", "Step time"} if run.emulated else set()
    figures = "".join(figure(chart, chart.title in timed) for chart in drawn)
    how = ""
    if len(steps) > MOST_POINTS:
        together = round(len(steps) / MOST_BINS)
        how = f"<small>line: median of each {together} steps; band: lowest to highest</small>"
    return f'<section><h2>Training{how}</h2><div class="charts">{figures}</div></section>'


def checkpoints(run: JobView) -> str:
    """Every checkpoint, finished or failed, newest first."""
    if not run.checkpoints:
        return ""
    rows = "".join(_checkpoint_row(report) for report in reversed(run.checkpoints))
    return (
        "<section><h2>Checkpoints</h2>"
        '<div class="card scroll" tabindex="0" role="region" aria-label="Checkpoints">'
        '<table><thead><tr><th class="number" scope="col">Step</th><th scope="col">State</th>'
        '<th class="number" scope="col">Size</th><th class="number" scope="col">Took</th>'
        f'<th scope="col">Where</th></tr></thead><tbody>{rows}</tbody></table></div></section>'
    )


def _checkpoint_row(report: CheckpointReport) -> str:
    if report.error is None:
        state, where, written = '<span class="pill good">saved</span>', report.path, size(report.bytes)
    else:
        state, where, written = '<span class="pill bad">failed</span>', report.error, "–"
    return (
        f'<tr><td class="number">{report.step:,}</td><td>{state}</td>'
        f'<td class="number">{written}</td><td class="number">{seconds(report.seconds)}</td>'
        f'<td class="text">{escape(where)}</td></tr>'
    )


def sample(run: JobView) -> str:
    """The text that the trained model wrote, its prompt marked."""
    if run.sample is None:
        return ""
    text = f"<mark>{escape(run.sample.prompt)}</mark>{escape(run.sample.text)}"
    return (
        f"<section><h2>Sampled text<small>after step {run.sample.step:,}; the prompt is marked</small></h2>"
        f'<pre class="card sample">{text}</pre></section>'
    )


def spec(run: JobView) -> str:
    """The resolved spec, folded away."""
    if not run.spec:
        return ""
    text = json.dumps(run.spec, indent=2, ensure_ascii=False)
    return f'<details class="card"><summary>Resolved spec</summary><pre>{escape(text)}</pre></details>'


def footer(run: JobView) -> str:
    runs = f" over {run.runs} runs" if run.runs > 1 else ""
    return (
        f"<footer>Made from events.jsonl: {counted(len(run.steps), 'step')}{runs}; the memory of a step from"
        " profile.json, where there is one.</footer>"
    )
