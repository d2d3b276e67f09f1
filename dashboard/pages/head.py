"""The top of a job's page: its state, how far it is, and the figures that tell how it does."""

from __future__ import annotations

from dataclasses import dataclass

from dashboard.pages.shown import Shown
from orchestrator.analysis.job_summary import JobSummary, job_summary
from orchestrator.quantities import operations, percent, rate, seconds, significant
from orchestrator.report.parts import Tile, Tone, tile
from orchestrator.report.run.sections import header
from planner.wording import counted

TONES: dict[str, Tone] = {
    "training": "good",
    "finished": "good",
    "failed": "bad",
    "refused": "bad",
    "lost": "bad",
}
"""State -> tone; other states are of interest and no failure."""


@dataclass(frozen=True)
class Head:
    """The top of the page."""

    summary: JobSummary
    tone: Tone
    what: str
    """One-line summary of what runs."""
    tiles: tuple[Tile, ...]


def tone_of(state: str) -> Tone:
    """The tone of a job's state."""
    return TONES.get(state, "warn")


def head(shown: Shown) -> Head:
    """The top of the page about `shown`."""
    view = shown.view
    summary = job_summary(view, trouble=shown.trouble, lost=shown.lost)
    return Head(summary, tone_of(summary.state), header(view).summary, tuple(_tiles(shown, summary)))


def _tiles(shown: Shown, summary: JobSummary) -> list[Tile]:
    view = shown.view
    newest = view.steps[max(view.steps)] if view.steps else None
    entries = [tile("Step", f"{summary.step:,}", f"of {summary.last_step:,}")]
    if summary.loss is not None:
        entries.append(tile("Loss", f"{summary.loss:.4f}", f"{summary.losses[0]:.4f} at first"))
    if view.validations:
        step = max(view.validations)
        entries.append(tile("Validation loss", f"{view.validations[step].loss:.4f}", f"at step {step:,}"))
    if summary.best is not None and summary.watched != "loss":
        entries.append(
            tile(f"Best {summary.watched}", f"{summary.best:.4f}", f"at step {summary.best_step:,}")
        )
    if summary.time_to_target_s is not None:
        entries.append(tile("Time to target", seconds(summary.time_to_target_s), view.spec["job"]["stop_at"]))
    if summary.tokens_per_s is not None:
        emulated = ", emulated" if view.emulated else ""
        entries.append(
            tile("Throughput", rate(summary.tokens_per_s), f"{summary.per_s}, newest steps{emulated}")
        )
    if summary.step_s is not None:
        plan = view.followed or view.plan
        predicted = plan.predicted_step_s if plan is not None else None
        detail = f"predicted {seconds(predicted)}" if predicted is not None else "median of the newest"
        entries.append(tile("Step time", seconds(summary.step_s), detail))
    if summary.epochs is not None:
        entries.append(tile("Epochs", significant(summary.epochs), f"of {view.train_samples:,} samples"))
    if summary.flops_per_s is not None:
        of_peak = f"MFU {percent(summary.mfu)}" if summary.mfu is not None else "of the model's passes"
        entries.append(tile("Compute", f"{operations(summary.flops_per_s)}/s", of_peak))
    if newest is not None:
        entries.append(tile("Bubble", percent(newest.bubble), "idle share of the newest step"))
    if shown.live:
        spares = counted(summary.spares, "spare") if summary.spares else "no spares"
        entries.append(tile("Ranks", str(summary.ranks), spares))
    if summary.effective_time_ratio is not None:
        entries.append(
            tile("Effective time", percent(summary.effective_time_ratio), "in committed steps that stand")
        )
    if summary.recoveries or summary.steps_rerun:
        entries.append(
            tile(
                "Failures cost",
                seconds(summary.recovery_s),
                f"{counted(summary.recoveries, 'recovery', 'recoveries')},"
                f" {counted(summary.steps_rerun, 'step')} run again",
            )
        )
    return entries
