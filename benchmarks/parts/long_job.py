"""The log of a job that has trained for long: four ranks that freeze. Nothing trains, and no time passes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import count, islice
from typing import Any

from orchestrator.events import types as events
from orchestrator.events.types import Record
from planner.ir import Schedule
from planner.plan import Plan
from planner.schedule.registry import build
from workers.protocol.orders import Generation
from workers.protocol.reports import (
    ActionSpan,
    FreezeReport,
    FrozenAction,
    Report,
    StepReport,
    TimelineReport,
)

NAME = "takeover"
RANKS = 4
MICROBATCHES = 8
LAYERS = 6
"""Layers per rank."""
PARAMETERS = 12
"""Parameters per layer."""
PLAN = Plan(
    epoch=1,
    version=1,
    reason="benchmark",
    layers=tuple((rank * LAYERS, (rank + 1) * LAYERS) for rank in range(RANKS)),
    stage_ranks=tuple(range(RANKS)),
    schedule="1f1b",
    chunks=1,
    microbatches=MICROBATCHES,
    replicas=1,
)
MONITORED = range(101, 201)
"""The steps of the monitoring phase, of which every rank reports a timeline: more actions than a view keeps."""
MONITORING_SPEC: dict[str, Any] = {
    "job": {"name": NAME, "steps": 1_000_000},
    "freeze": {
        "method": "timelyfreeze",
        "r_max": 0.8,
        "warm_up": MONITORED.start - 1,
        "monitoring": MONITORED.stop - 1,
        "ramp": 1_000,
    },
}


def job(most: int, spec: dict[str, Any] | None = None) -> Iterator[Record]:
    """The first `most` events of the job.

    Args:
        spec: `MONITORING_SPEC`, for a job with timelines; None: nothing is said of its settings, and it has none.
    """
    return islice(_whole_job(spec), most)


def reports_of(step: int, *, timelines: bool) -> Iterator[Report]:
    """What the ranks report of one step."""
    yield step_report(step)
    for rank in range(RANKS):
        yield freeze_report(step, rank)
        if timelines:
            yield timeline_report(step, rank)


def step_report(step: int) -> StepReport:
    return StepReport(
        generation=1,
        step=step,
        loss=3.14159265358979 + 1 / step,
        grad_norm=1.23456789012345 + 1 / step,
        lr=1.2345678e-4,
        samples=32,
        tokens=32_768,
        step_s=0.123456789,
        bubble=0.123456789,
        skipped=False,
        gradient_energy=1.23456789,
        effective_update=0.912345678,
        committed_s=1.7e9 + step,
        samples_digest="0123456789abcdef",
    )


def freeze_report(step: int, rank: int) -> FreezeReport:
    return FreezeReport(
        step=step,
        rank=rank,
        actions=tuple(
            FrozenAction(stage=rank, microbatch=microbatch, planned=0.5, actual=0.4, parameters=0.3)
            for microbatch in range(MICROBATCHES)
        ),
        passes=MICROBATCHES,
        counts=tuple((rank * LAYERS + layer, (step % 3,) * PARAMETERS) for layer in range(LAYERS)),
    )


def timeline_report(step: int, rank: int) -> TimelineReport:
    return TimelineReport(
        step=step,
        rank=rank,
        step_s=0.123456789,
        spans=tuple(
            ActionSpan(
                action=str(action), start_s=0.0071234567 * place, end_s=0.0071234567 * place + 0.0061234567
            )
            for place, action in enumerate(schedule().programs[rank])
        ),
        memory_bytes=1_234_567_890,
    )


@cache
def schedule() -> Schedule:
    """The schedule of `PLAN`."""
    return build(PLAN.schedule, RANKS, MICROBATCHES)


def _whole_job(spec: dict[str, Any] | None) -> Iterator[Record]:
    members = tuple(range(RANKS))
    generation = Generation(number=1, epoch=1, members=members, store_host="h", store_port=1, timeout_s=1.0)
    yield Record(time_s=0.0, event=events.Submitted(job=NAME, epoch=1, spec=spec or {}, resume=False))
    for rank in members:
        started = events.RankStarted(rank=rank, node=f"node-{rank}", host="10.0.0.1", pid=rank)
        yield Record(time_s=0.0, event=started)
    yield Record(time_s=0.0, event=events.Issued(plan=PLAN))
    yield Record(time_s=0.0, event=events.Formed(generation=generation, start=None, step=0))
    for step in count(1):
        for report in reports_of(step, timelines=spec is not None and step in MONITORED):
            yield Record(time_s=0.1 * (step - 1), event=report)
