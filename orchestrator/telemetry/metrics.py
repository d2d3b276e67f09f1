"""The table of metrics: the one place that says what a job's metrics are called and mean.

Knows no job: `samples.py` takes the values from a view. Each metric also has the label `job`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter"]

STATES = ("pending", "starting", "training", "waiting", "paused", "finished", "stopped", "failed")
"""States of a job, as in `JobView.state`."""
CAUSES = ("loss", "drain", "join", "capacity", "resume", "move", "scale", "pack", "memory", "retry")
"""Why a generation replaces another one, as in `Regrouped.cause`."""
MODES = ("live", "deferred", "stop")
"""Modes in which layers move between training ranks, as in `Migrated.mode`."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric."""

    name: str
    """Name that Prometheus shows; Ray's endpoint puts `ray_` before it."""
    kind: Kind
    """A `counter` only grows."""
    help: str
    unit: str
    labels: tuple[str, ...] = ()
    """Besides `job`."""


def _gauge(name: str, unit: str, help: str, *labels: str) -> Metric:
    return Metric(name=f"freshet_{name}", kind="gauge", help=help, unit=unit, labels=labels)


def _counter(name: str, unit: str, help: str, *labels: str) -> Metric:
    return Metric(name=f"freshet_{name}", kind="counter", help=help, unit=unit, labels=labels)


METRICS = (
    _gauge("job_state", "0 or 1", f"1 for the state that the job is in: {', '.join(STATES)}", "state"),
    _gauge("controller_up", "0 or 1", "0 if the job should have a controller and has none"),
    _gauge("step", "steps", "Steps committed"),
    _gauge("last_step", "steps", "The step at which the job is done"),
    _gauge(
        "last_step_timestamp_seconds",
        "seconds since 1970",
        "When the newest step was committed; the start of the job before its first",
    ),
    _gauge("step_seconds", "seconds", "Median of the newest 20 steps, from commit to commit"),
    _gauge("predicted_step_seconds", "seconds", "The planner's prediction for the current plan"),
    _gauge("predicted_step_ratio", "ratio", "Predicted over measured step time"),
    _gauge("tokens_per_second", "tokens/s", "Over the newest 20 steps; samples if the model has no tokens"),
    _counter("tokens_total", "tokens", "Tokens of committed steps, steps that ran twice included"),
    _gauge("samples_per_hour", "samples/h", "Over the newest 20 steps"),
    _gauge("epochs", "epochs", "Passes over the training samples"),
    _gauge(
        "flops_per_second",
        "FLOP/s",
        "Floating-point operations of the model's passes, over the newest 20 steps; not of emulated devices",
    ),
    _gauge(
        "mfu_ratio",
        "ratio",
        "Their share of what the makers publish for the ranks' devices (model FLOPs utilization), where they do",
    ),
    _gauge("loss", "", "Training loss of the newest step"),
    _gauge("validation_loss", "", "The newest validation"),
    _gauge("validation_metric", "", "Accuracy and the like, of the newest validation", "metric"),
    _gauge(
        "time_to_target_seconds",
        "seconds",
        "Duration of the steps that stand up to the first validation that reached `job.stop_at`",
    ),
    _gauge("gradient_norm", "", "Global norm of the newest step's gradient, before clipping"),
    _gauge("learning_rate", "", "Of the newest step"),
    _gauge(
        "bubble_ratio", "ratio", "Share of the newest step in which ranks did not compute, mean over ranks"
    ),
    _gauge("freeze_ratio", "ratio", "Share of the weight-gradient time that a step left out"),
    _gauge("ranks", "ranks", "Ranks that train"),
    _gauge("spare_ranks", "ranks", "Ranks that are up and have no place"),
    _gauge(
        "ranks_without_redundancy",
        "ranks",
        "Ranks that hold layers of which no other rank has an up-to-date copy or a snapshot; only of jobs that want"
        " copies",
    ),
    _gauge(
        "rank_memory_bytes",
        "bytes",
        "Memory of a rank at its newest measured step: the peak of its tensors on a GPU, else its process",
        "rank",
    ),
    _gauge(
        "rank_slowdown_ratio",
        "ratio",
        "Forward time of a rank in the newest measured step over its shortest with the same layers",
        "rank",
    ),
    _gauge("checkpoint_step", "steps", "Step of the newest complete checkpoint"),
    _counter("ranks_lost_total", "ranks", "Ranks that failed or were released", "cause"),
    _counter("recoveries_total", "recoveries", "Generations that replaced another one", "cause"),
    _counter(
        "recovery_seconds_total",
        "seconds",
        "Time of recoveries by part: detect, settle, plan, move, resume",
        "cause",
        "part",
    ),
    _counter("steps_rerun_total", "steps", "Interrupted or voided steps that were run again"),
    _gauge(
        "training_time_ratio",
        "ratio",
        "Effective training time: time in committed steps that stand, less what standstills of ranks added to them,"
        " over all time since the first step",
    ),
    _counter("moves_total", "moves", "Moves of layers between training ranks", "mode"),
    _counter("move_seconds_total", "seconds", "Time of moves, from request to switch", "mode"),
    _counter("moved_bytes_total", "bytes", "Layer state that moves sent"),
    _gauge(
        "planner_seconds",
        "seconds",
        "What the newest decision took: freeze ratios (`freeze`), or the plan of a recovery (`recovery`)",
        "decision",
    ),
)

BY_NAME = {metric.name: metric for metric in METRICS}
