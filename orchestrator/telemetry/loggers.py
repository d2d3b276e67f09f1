"""Job events as experiment loggers get them, and the rule for steps that run twice. Knows no logger's library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from orchestrator.analysis.achieved import HOUR_S
from orchestrator.analysis.throughput import throughput
from orchestrator.events.types import Event, FlopsCounted, Migrated, Record, Regrouped, Submitted
from orchestrator.history.totals import part_seconds
from workers.protocol.reports import StepReport, ValidationReport


@dataclass(frozen=True, kw_only=True)
class StepValues:
    """Values of one step."""

    step: int
    time_s: float
    """Seconds since the Unix epoch."""
    values: Mapping[str, float]


class Logger(Protocol):
    """One run at an experiment logger."""

    def log(self, entries: Sequence[StepValues]) -> None:
        """Write `entries`; their steps need not ascend."""
        ...

    def close(self) -> None:
        """Write what waits and end the run."""
        ...


@dataclass(frozen=True, kw_only=True)
class _KnownJob:
    """Facts about the job of a sink, as its events tell them."""

    train_samples: int = 0
    flops_per_sample: float | None = None
    emulated: bool = False

    def after(self, event: Event) -> _KnownJob:
        match event:
            case Submitted(spec=spec, train_samples=samples):
                emulated = spec.get("cluster", {}).get("device") == "emulated"
                return replace(self, train_samples=samples, emulated=emulated)
            case FlopsCounted(flops_per_sample=count):
                return replace(self, flops_per_sample=count)
            case _:
                return self


class LoggerSink:
    """Writes a job's events to `logger`.

    A step is written once, when it is first committed: steps that run again repeat the same numbers, and a logger would
    show them twice.

    Args:
        step: steps up to this one were written by earlier controllers of the job.
    """

    def __init__(self, logger: Logger, step: int) -> None:
        self._logger = logger
        self._step = self._validated = step
        self._job = _KnownJob()

    def accept(self, records: Sequence[Record]) -> None:
        """Write what loggers show of `records`."""
        entries = []
        for record in records:
            event = record.event
            self._job = self._job.after(event)
            if isinstance(event, StepReport):
                if event.step <= self._step:
                    continue
                self._step = event.step
            elif isinstance(event, ValidationReport):
                if event.step <= self._validated:
                    continue
                self._validated = event.step
            if (entry := entry_of(event, record.time_s, self._job)) is not None:
                entries.append(entry)
        if entries:
            self._logger.log(entries)

    def close(self) -> None:
        """End the run."""
        self._logger.close()


def entry_of(event: Event, time_s: float, job: _KnownJob) -> StepValues | None:
    """Values of `event` that loggers show; the names are those of the metrics, without `freshet_`.

    Args:
        job: what is known of it.
    """
    match event:
        case StepReport(step=step):
            values = {
                "loss": event.loss,
                "gradient_norm": event.grad_norm,
                "learning_rate": event.lr,
                "step_seconds": event.step_s,
                "bubble_ratio": event.bubble,
            }
            if event.step_s > 0:
                values["tokens_per_second"] = throughput(event)
            values |= _use(event, job)
            return StepValues(step=step, time_s=event.committed_s or time_s, values=values)
        case ValidationReport(step=step):
            values = {f"validation_{name}": value for name, value in event.metrics.items()}
            return StepValues(step=step, time_s=time_s, values={"validation_loss": event.loss, **values})
        case Regrouped(step=step):
            parts = {f"recovery_seconds/{part}": seconds for part, seconds in part_seconds(event).items()}
            counts = {
                "ranks_lost": float(len(event.lost)),
                "steps_rerun": float(event.rerun + event.steps_lost),
            }
            return StepValues(step=step, time_s=time_s, values={**parts, **counts})
        case Migrated(step=step):
            values = {"move_seconds": event.seconds, "moved_layers": float(len(event.layers))}
            return StepValues(step=step, time_s=time_s, values=values)
        case _:
            return None


def _use(step: StepReport, job: _KnownJob) -> dict[str, float]:
    """Passes over the data, and the use of the devices in one step."""
    found: dict[str, float] = {}
    if job.train_samples:
        found["epochs"] = step.step * step.samples / job.train_samples
    if step.step_s > 0:
        per_s = step.samples / step.step_s
        found["samples_per_hour"] = HOUR_S * per_s
        if job.flops_per_sample is not None and not job.emulated:
            found["flops_per_second"] = per_s * job.flops_per_sample
    return found
