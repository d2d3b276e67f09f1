"""The log of a made-up job whose layers freeze from the input up and whose pipelines follow."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from synthetic_run import START_S, plan, spec, step_report

from orchestrator.events.types import Event, Formed, Issued, LayoutWeighed, Record, Regrouped, Submitted
from workers.protocol.orders import Generation
from workers.protocol.reports import ActivationsKept, ActivationsUsed, PrefixFrozen

LAYERS = 10
FROZEN_AT, PACKED_AT, STEPS = 21, 31, 60
"""The steps from which on six layers are frozen, and two pipelines of two ranks run."""
STEP_S = ((FROZEN_AT, 0.4), (PACKED_AT, 0.25), (STEPS + 1, 0.1))
"""(first step after them, time of each)."""
WEIGHED = LayoutWeighed(
    prefix=FROZEN_AT, pays=True, reason="as 2 pipelines a step takes 100 ms instead of 250 ms"
)


def packed_spec() -> dict[str, Any]:
    """Two replicas, which one pipeline executes at first."""
    given = spec("cpu")
    return {
        **given,
        "pipeline": {**given["pipeline"], "replicas": 2, "pipelines": 1},
        "freeze": {"method": "pipetransformer", "alpha": 0.5, "warm_up": 0, "batch": "keep"},
    }


def packed_records(*, why_not: str = "") -> list[Record]:
    """The log of a job that trains on, oldest record first.

    Args:
        why_not: why nothing is kept of frozen layers; empty: it is.
    """
    random, clock_s = Random(7), START_S
    log: list[Record] = []

    def put(event: Event) -> None:
        log.append(Record(time_s=clock_s, event=event))

    def form(number: int, step: int) -> None:
        generation = Generation(
            number=number,
            epoch=1,
            members=(0, 1, 2, 3),
            store_host="10.0.0.4",
            store_port=29500,
            timeout_s=300.0,
        )
        put(Formed(generation=generation, start=None, step=step))

    first = replace(plan(), replicas=2, pipelines=1)
    put(Submitted(job="packed", epoch=1, spec=packed_spec(), resume=False))
    put(Issued(plan=first))
    form(1, 0)
    for step in range(1, STEPS + 1):
        if step == FROZEN_AT:
            names = tuple(f"layer{number}" for number in range(6))
            put(PrefixFrozen(step=step, layers=6, bound=6.0, norms=(1.0,) * LAYERS, names=names))
            put(WEIGHED)
            read_s, computed_s = (0.0, 0.0) if why_not else (0.001, 0.05)
            kept = ActivationsKept(
                step=step, rank=0, layers=6, why_not=why_not, read_s=read_s, computed_s=computed_s
            )
            put(kept)
        if step == PACKED_AT:
            put(ActivationsUsed(step=step - 1, rank=0, layers=6, hits=0, partly=0, misses=80, bytes=4096))
            put(
                Issued(
                    plan=replace(
                        first,
                        version=2,
                        reason=WEIGHED.reason,
                        layers=((0, 8), (8, 10)),
                        stage_ranks=(0, 1),
                        pipelines=2,
                        frozen=6,
                    )
                )
            )
            form(2, step - 1)
            put(
                Regrouped(
                    generation=2,
                    cause="pack",
                    reason=WEIGHED.reason,
                    lost=(),
                    joined=(),
                    step=step - 1,
                    rerun=0,
                    steps_lost=0,
                    detect_s=0.0,
                    settle_s=0.01,
                    plan_s=0.02,
                    move_s=0.03,
                    resume_s=0.04,
                )
            )
        step_s = next(each for stop, each in STEP_S if step < stop)
        clock_s += step_s
        report = step_report(step, random)
        generation = 1 if step < PACKED_AT else 2
        put(replace(report, generation=generation, step_s=step_s, samples=2 * report.samples))
    for rank in (0, 2):
        put(ActivationsUsed(step=STEPS, rank=rank, layers=6, hits=100, partly=10, misses=10, bytes=4096))
    return log
