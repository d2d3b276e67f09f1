"""The few numbers of a run for other programs, from its event log. Pure except for reading that file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from orchestrator.analysis.achieved import best_so_far, compute, epochs_done, time_to_target_s, why_ended
from orchestrator.analysis.freeze_numbers import FreezeNumbers, freeze_numbers
from orchestrator.analysis.throughput import mean_throughput
from orchestrator.events import types as events
from orchestrator.events.log import read_log
from orchestrator.history.job_view import fold
from workers.protocol.reports import StepReport


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The numbers that `--summary` writes; None where a run has no such number."""

    name: str
    steps: int
    """Steps committed."""
    first_loss: float | None
    final_loss: float | None
    validation_loss: float | None
    """The newest one."""
    metrics: dict[str, float]
    """Metrics of the newest validation."""
    best: dict[str, float] | None
    """Metrics of the validation with the best value of the metric that the job watches, its loss and its step."""
    time_to_target_s: float | None
    """Duration of the steps that stand up to the first validation that reached `job.stop_at`."""
    why: str
    """Reason, in words, why validations ended it; empty: none did."""
    epochs: float | None
    """Passes over the training samples."""
    tokens_per_s: float | None
    """Over the steps of the newest start except its first; samples per second if there are no tokens."""
    samples_per_hour: float | None
    """Over the same steps."""
    flops_per_s: float | None
    """Floating-point operations per second that the model's passes take, over the same steps."""
    mfu: float | None
    """Their share of what the makers publish for the ranks' devices."""
    step_time_s: float | None
    """Median over the same steps."""
    first_step_after_s: float | None
    """From `started_s` to the first committed step of the newest start."""
    state_sha256: str | None
    """Hash of all weights and buffers in layer order: name, dtype, shape, bytes."""
    partition: tuple[int, ...]
    """Layers per stage."""
    events: str
    """Path of the event log."""
    freeze: FreezeNumbers | None = None
    """Only of a job that freezes."""

    def to_dict(self) -> dict[str, object]:
        numbers = asdict(self)
        if self.freeze is None:
            del numbers["freeze"]
        return numbers

    def to_json(self) -> str:
        """The summary as JSON text; numbers that are not finite are written by name, `"Infinity"`."""
        return json.dumps(events.named_floats(self.to_dict()), indent=1, allow_nan=False)


def summarize(path: Path, *, started_s: float) -> RunSummary:
    """The summary of the run whose event log is at `path`.

    Args:
        started_s: when the newest start began, in seconds since the Unix epoch.
    """
    records = list(read_log(path))
    run = fold(records)
    steps = [run.steps[number] for number in sorted(run.steps)]
    recent = _steps_of_newest_start(records)
    timed = recent[1:] or recent
    used, best = compute(run, timed), best_so_far(run)
    return RunSummary(
        name=run.job,
        steps=steps[-1].step if steps else 0,
        first_loss=steps[0].loss if steps else None,
        final_loss=steps[-1].loss if steps else None,
        validation_loss=run.validations[max(run.validations)].loss if run.validations else None,
        metrics=run.validations[max(run.validations)].metrics if run.validations else {},
        best=None if best is None else {**best.values, "step": best.step},
        time_to_target_s=time_to_target_s(run),
        why=why_ended(run),
        epochs=epochs_done(run),
        tokens_per_s=mean_throughput(timed),
        samples_per_hour=None if used is None else used.samples_per_hour,
        flops_per_s=None if used is None else used.flops_per_s,
        mfu=None if used is None else used.mfu,
        step_time_s=median(step.step_s for step in timed) if timed else None,
        first_step_after_s=run.first_step_s - started_s if run.first_step_s is not None else None,
        state_sha256=_state_sha256(records),
        partition=run.plan.layers_per_stage if run.plan is not None else (),
        events=str(path),
        freeze=freeze_numbers(run),
    )


def _steps_of_newest_start(records: Sequence[events.Record]) -> list[StepReport]:
    steps: list[StepReport] = []
    for record in records:
        if isinstance(record.event, events.Submitted):
            steps = []
        elif isinstance(record.event, StepReport):
            steps.append(record.event)
    return steps


def _state_sha256(records: Sequence[events.Record]) -> str | None:
    ends = [
        record.event.state_sha256
        for record in records
        if isinstance(record.event, events.Finished) and record.event.state_sha256 is not None
    ]
    return ends[-1] if ends else None
