"""The ranks' reports as events: level and sentence of each, as for the controller's own in `types.py`. Pure.

One more report is its class in `workers/protocol/reports.py` and a row here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar

from orchestrator.events.level import Level, shortened
from orchestrator.quantities import percent, rate, seconds, significant, size
from planner.wording import counted, named
from workers.protocol.reports import (
    ActivationsKept,
    ActivationsUsed,
    CheckpointReport,
    CopiedAhead,
    CurvatureReport,
    FaultReport,
    FreezeReport,
    FreezeStarted,
    FrozenCounts,
    LayersChecked,
    MemoryLow,
    NoticeReport,
    PrefixFrozen,
    Report,
    Rescued,
    SampleReport,
    StandbyReport,
    StepReport,
    SwitchReport,
    TimelineReport,
    ValidationReport,
    WarningReport,
)

Of = TypeVar("Of")


@dataclass(frozen=True)
class Row(Generic[Of]):
    """A class of reports in words."""

    of: type[Of]
    sentence: Callable[[Of], str]
    level: Level | Callable[[Of], Level] = "detail"


def report_level(report: Report) -> Level:
    """The level of `report`."""
    level = ROWS[type(report)].level
    return level(report) if callable(level) else level


def report_sentence(report: Report) -> str:
    """`report` in words."""
    return ROWS[type(report)].sentence(report)


def step_fields(
    report: StepReport, validation: ValidationReport | None = None, freezing: Sequence[str] = ()
) -> str:
    """The figures of one step in one line, with freezing and the newest validation loss last."""
    unit, count = ("tokens", report.tokens) if report.tokens else ("samples", report.samples)
    fields = [
        f"loss {report.loss:.4f}",
        f"grad norm {significant(report.grad_norm)}",
        f"{rate(count / report.step_s)} {unit}/s" if report.step_s > 0 else f"- {unit}/s",
        f"step time {seconds(report.step_s)}",
        f"bubble {percent(report.bubble)}",
        *freezing,
    ]
    if validation is not None:
        fields.append(validation_text(validation))
    return "  ".join(fields)


def validation_text(report: ValidationReport) -> str:
    """The loss and the metrics of a validation."""
    return ", ".join((f"validation loss {report.loss:.4f}", *metric_texts(report.metrics)))


def metric_texts(metrics: Mapping[str, float]) -> list[str]:
    """Metrics with their values: `accuracy 0.9712`."""
    return [f"{name} {value:.4f}" for name, value in metrics.items()]


def skipped_text(report: StepReport) -> str:
    """A skipped step in words."""
    norm = "not a number" if math.isnan(report.grad_norm) else f"{report.grad_norm}"
    return f"step {report.step} skipped: its gradient norm is {norm}, so no weight was changed"


def _step_text(report: StepReport) -> str:
    return skipped_text(report) if report.skipped else f"step {report.step}  {step_fields(report)}"


def _checkpoint_text(report: CheckpointReport) -> str:
    if report.error is not None:
        return f"the checkpoint of step {report.step} failed, the ones before it stay: {report.error}"
    cost = f"{size(report.bytes)} in {seconds(report.seconds)}"
    return f"checkpoint of step {report.step} saved: {cost}, {report.path}"


def _injected_text(report: FaultReport) -> str:
    """An injected fault in words: which, on which rank, where."""
    place = f" in phase {report.phase} of step {report.step}" if report.phase else ""
    if report.file:
        return f"injected fault: {report.fault} changes a bit of {report.file}, by rank {report.rank}{place}"
    return f"injected fault: {report.fault} on rank {report.rank}{place}"


def _copies_text(report: StandbyReport) -> str:
    place, step, pieces = report.rank, report.step, named("layer", report.pieces) if report.pieces else ""
    if report.snapshot:
        return f"the first snapshot in place {place} is complete at step {step}: {pieces}"
    if report.given_up:
        return f"the copies in place {place} are given up at step {step}, for want of host memory: {pieces}"
    if not pieces:
        return f"place {place} has built at step {step} what it owns in the next generation"
    rest = "" if report.built else "; it still builds what it owns in the next generation"
    return f"the copies in place {place} are up to date at step {step}: {pieces}{rest}"


def _copied_text(copied: CopiedAhead) -> str:
    if copied.error is not None:
        return f"rank {copied.rank} copies no layers ahead: {copied.error}"
    return (
        f"rank {copied.rank} has copies of {named('layer', copied.layers)} as of step {copied.step}:"
        f" {size(copied.bytes)} in {seconds(copied.seconds)}"
    )


def _prefix_text(prefix: PrefixFrozen) -> str:
    if not prefix.layers:
        return f"no layer is frozen as a whole from step {prefix.step} on"
    text = (
        f"from step {prefix.step} on {counted(prefix.layers, 'layer')}, {prefix.names[0]} to {prefix.names[-1]}, go"
        " forward only"
        if prefix.layers > 1
        else f"from step {prefix.step} on layer {prefix.names[0]} goes forward only"
    )
    if prefix.tied:
        text += f"; what {named('layer', prefix.tied)} shares with a layer above is trained on, by that one's gradient"
    if (leg := prefix.leg) is not None:
        text += f"; a step takes {counted(leg.batch, 'sample')} from then on, of {counted(leg.replicas, 'replica')}"
        if leg.lr_factor != 1.0:
            text += f", at {leg.lr_factor:.3g} times the learning rate"
    return text


def _kept_text(kept: ActivationsKept) -> str:
    layers, samples = counted(kept.layers, "frozen layer"), "held-out samples" if kept.held_out else "samples"
    if kept.why_not and not kept.read_s:
        return f"what {layers} make of {samples} is not kept: {kept.why_not}"
    times = f"to read a microbatch takes {seconds(kept.read_s)}, to compute it {seconds(kept.computed_s)}"
    if kept.why_not:
        return f"what {layers} make of {samples} is not kept: {times}"
    return f"rank {kept.rank} keeps what {layers} make of {samples} from step {kept.step} on: {times}"


def _used_text(used: ActivationsUsed) -> str:
    partly = f", {used.partly:,} of fewer layers" if used.partly else ""
    if used.fetched:
        partly += f", {used.fetched:,} with ranks of other nodes in {seconds(used.fetch_s)} each"
    return (
        f"rank {used.rank} found what {counted(used.layers, 'frozen layer')} make of"
        f" {used.hits:,} of {used.hits + used.partly + used.misses:,} microbatches{partly}, up to step {used.step}:"
        f" {size(used.bytes)} kept"
    )


def _low_text(low: MemoryLow) -> str:
    return (
        f"the device of rank {low.rank} has {size(low.left_bytes)} left beside what step {low.step} takes of it, less"
        f" than the reserve of {size(low.reserve_bytes)}"
    )


def _checked_text(checked: LayersChecked) -> str:
    text = (
        f"rank {checked.rank} compared {counted(len(checked.layers), 'layer')} with plain autograd in"
        f" {seconds(checked.seconds)}: the same numbers"
    )
    left = "; ".join(f"{name} is left to it, as {why}" for name, why in checked.whole.items())
    return f"{text}; {left}" if left else text


def _rescued_text(rescued: Rescued) -> str:
    """The ranks' reaction to the loss of the cluster's head, and what follows; times are local ones."""
    lost, ends = (
        datetime.fromtimestamp(moment).strftime("%H:%M:%S") for moment in (rescued.lost_s, rescued.ends_s)
    )
    wrote = (
        f"wrote a checkpoint of step {rescued.step} in {seconds(rescued.seconds)}"
        if rescued.error is None
        else f"could not write a checkpoint of step {rescued.step}: {rescued.error}"
    )
    return (
        f"the cluster's head has not answered since {lost}. Unless it comes back, Ray ends the job's processes about"
        f" {ends}. The ranks {wrote}, and train on; --resume goes on from their newest checkpoint"
    )


_PASSES = ("backward pass", "backward passes")

_ALL: tuple[Row[Any], ...] = (
    Row(StepReport, _step_text),
    Row(ValidationReport, lambda it: f"step {it.step}  {validation_text(it)}"),
    Row(CheckpointReport, _checkpoint_text, lambda it: "detail" if it.error is None else "warning"),
    Row(
        TimelineReport,
        lambda it: f"times of {counted(len(it.spans), 'action')} of place {it.rank} in step {it.step}",
    ),
    Row(
        SampleReport,
        lambda it: f"written by the model after step {it.step}: {shortened(it.prompt + it.text)}",
    ),
    Row(
        FreezeStarted,
        lambda it: (
            f"the ratios of freeze plan {it.plan.epoch}.{it.plan.version} take effect with step {it.plan.start}"
        ),
        "progress",
    ),
    Row(PrefixFrozen, _prefix_text, "progress"),
    Row(ActivationsKept, _kept_text, lambda it: "detail" if it.held_out else "progress"),
    Row(ActivationsUsed, _used_text),
    Row(
        FreezeReport,
        lambda it: (
            f"shares that place {it.rank} froze in {counted(len(it.actions), *_PASSES)} of step {it.step}"
        ),
    ),
    Row(
        FrozenCounts,
        lambda it: (
            f"parameters that place {it.rank} froze in {counted(it.passes, *_PASSES)}, up to step {it.step}"
        ),
    ),
    Row(
        CurvatureReport,
        lambda it: f"change of the gradient with the weights of place {it.rank} before step {it.step}",
    ),
    Row(StandbyReport, _copies_text),
    Row(
        SwitchReport,
        lambda it: (
            f"place {it.rank} follows plan {it.epoch}.{it.version} after step {it.step}, {seconds(it.stall_s)} of"
            " standing still"
        ),
    ),
    Row(CopiedAhead, _copied_text),
    Row(FaultReport, _injected_text, "note"),
    Row(NoticeReport, lambda it: f"rank {it.rank} has notice that it must leave ({it.source}): {it.text}"),
    Row(MemoryLow, _low_text),
    Row(LayersChecked, _checked_text),
    Row(Rescued, _rescued_text, "warning"),
    Row(WarningReport, lambda it: f"rank {it.rank}: {it.text}", "warning"),
)
ROWS: Mapping[type[Report], Row[Any]] = {row.of: row for row in _ALL}
