"""Event logs of realistic jobs: one of 1F1B on four ranks, with noise, a slow first step and a skipped one;
and one that freezes, with TimelyFreeze's phases.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from orchestrator.events.types import (
    Event,
    Finished,
    Formed,
    FreezeSolved,
    Issued,
    RankStarted,
    Record,
    Submitted,
)
from planner.freezing import FreezePlan, Phase, Phases
from planner.plan import Plan
from workers.protocol.orders import Generation
from workers.protocol.reports import (
    ActionSpan,
    CheckpointReport,
    FreezeReport,
    FreezeStarted,
    FrozenAction,
    FrozenCounts,
    SampleReport,
    StepReport,
    TimelineReport,
    ValidationReport,
)

START_S = 1_763_628_000.0
RANKS, MICROBATCHES, STEPS = 4, 8, 200


def one_f_one_b(rank: int) -> list[str]:
    """The tokens of one rank's 1F1B program."""
    warm_up = RANKS - 1 - rank
    tokens = [f"{rank}F{index}" for index in range(warm_up)]
    for index in range(MICROBATCHES):
        if index + warm_up < MICROBATCHES:
            tokens.append(f"{rank}F{index + warm_up}")
        tokens.append(f"{rank}B{index}")
    return tokens


def nothing_frozen(stage: int, microbatch: int) -> float:
    return 0.0


def timelines(
    step: int, random: Random, frozen: Callable[[int, int], float] = nothing_frozen, windows: int = 1
) -> list[TimelineReport]:
    """What each rank does when a forward takes about 4 ms and a backward 8 ms, of which freezing saves 4.

    Args:
        frozen: (stage, microbatch) -> share that is frozen.
        windows: number of replicas that run one after the other.
    """
    programs = [one_f_one_b(rank) * windows for rank in range(RANKS)]
    done: dict[tuple[int, str], float] = {}
    spans: list[list[ActionSpan]] = [[] for _ in range(RANKS)]
    while any(len(spans[rank]) < len(programs[rank]) for rank in range(RANKS)):
        for rank in range(RANKS):
            if len(spans[rank]) == len(programs[rank]):
                continue
            token = programs[rank][len(spans[rank])]
            window = len(spans[rank]) // (2 * MICROBATCHES)
            kind, index = token[1], token[2:]
            source = rank - 1 if kind == "F" else rank + 1
            needs = (window, f"{source}{kind}{index}") if 0 <= source < RANKS else None
            if needs is not None and needs not in done:
                continue
            free = spans[rank][-1].end_s if spans[rank] else 0.001
            start_s = max(free, done[needs] + 0.0004 if needs else 0.0)
            usual_s = 0.004 if kind == "F" else 0.008 - 0.004 * frozen(rank, int(index))
            end_s = start_s + usual_s * random.uniform(0.93, 1.1)
            done[window, token] = end_s
            spans[rank].append(ActionSpan(action=token, start_s=start_s, end_s=end_s))
    step_s = max(done.values()) + 0.003
    return [
        TimelineReport(step=step, rank=rank, step_s=step_s, spans=tuple(spans[rank]), memory_bytes=0)
        for rank in range(RANKS)
    ]


def spec(device: str = "cpu") -> dict[str, Any]:
    """A resolved spec."""
    return {
        "job": {"name": "python-docs-gpt", "seed": 17, "steps": STEPS, "precision": "float32", "threads": 1},
        "model": {"family": "gpt", "layers": 8, "width": 128, "heads": 4, "context": 128, "vocabulary": 256},
        "data": {"source": "python-docs", "path": None, "tokenizer": "bytes"},
        "optimizer": {
            "name": "adamw",
            "lr": 0.001,
            "weight_decay": 0.1,
            "clip_norm": 1.0,
            "warmup_steps": 20,
        },
        "pipeline": {"ranks": RANKS, "schedule": "1f1b", "microbatches": MICROBATCHES, "microbatch_size": 4},
        "checkpoint": {"every_steps": 50, "keep": 2},
        "cluster": {"address": "local", "device": device},
    }


def plan() -> Plan:
    return Plan(
        epoch=1,
        version=1,
        reason="first plan: stages balanced by parameter count",
        layers=((0, 3), (3, 5), (5, 7), (7, 10)),
        stage_ranks=(0, 1, 2, 3),
        schedule="1f1b",
        chunks=1,
        microbatches=MICROBATCHES,
        replicas=1,
    )


def step_report(step: int, random: Random, *, skipped: bool = False) -> StepReport:
    """A step on a falling loss curve."""
    loss = 1.75 + 3.8 * math.exp(-step / 45) + random.gauss(0, 0.035)
    return StepReport(
        generation=1,
        step=step,
        loss=loss,
        grad_norm=math.inf if skipped else 0.4 + 5 * math.exp(-step / 30) + random.expovariate(8),
        lr=1e-3 * min(1.0, step / 20),
        samples=MICROBATCHES * 4,
        tokens=MICROBATCHES * 4 * 128,
        step_s=1.21 if step == 1 else random.gauss(0.134, 0.004) + (0.09 if random.random() < 0.02 else 0),
        bubble=random.gauss(0.285, 0.008),
        skipped=skipped,
    )


def records(*, device: str = "cpu", steps: int = STEPS, sample: str | None = None) -> list[Record]:
    """The entire log, oldest record first."""
    random = Random(3)
    clock_s = START_S
    log: list[Record] = []

    def put(event: Event) -> None:
        log.append(Record(time_s=clock_s, event=event))

    put(Submitted(job="python-docs-gpt", epoch=1, spec=spec(device), resume=False))
    put(Issued(plan=plan()))
    clock_s += 5.2
    for rank in range(RANKS):
        put(RankStarted(rank=rank, node="5f0c" if rank < 2 else "a91e", host="10.0.0.4", pid=4000 + rank))
    generation = Generation(
        number=1, epoch=1, members=(0, 1, 2, 3), store_host="10.0.0.4", store_port=29500, timeout_s=300.0
    )
    put(Formed(generation=generation, start=None, step=0))
    for step in range(1, steps + 1):
        report = step_report(step, random, skipped=step == 88)
        clock_s += report.step_s
        put(report)
        if step % 25 == 0:
            put(ValidationReport(step=step, loss=1.83 + 3.7 * math.exp(-step / 45)))
        if step % 50 == 0:
            error = "no space left on device while writing layer 4" if step == 100 else None
            size = 0 if error else 25_382_912
            path = f"runs/python-docs-gpt/checkpoints/step-{step:08d}-g1"
            put(CheckpointReport(step=step, path=path, bytes=size, seconds=0.21, error=error))
    for timeline in timelines(steps, random):
        put(timeline)
    put(SampleReport(step=steps, prompt="The Python interpreter", text=sample or SAMPLE))
    put(Finished(step=steps, stopped=False, state_sha256="9f2c" * 16))
    return log


SAMPLE = """ returns a list of the strings that the object
was created with. If the *default* argument is given and not "None", the value is
used instead of the one that "__getitem__()" would raise for the missing key.

   >>> d = dict(a=1, b=2)
   >>> d.get("c", 3)
   3

See also: "collections.OrderedDict" remembers the order in which entries were added."""


PHASES = Phases(warm_up=20, monitoring=30, ramp=60)
RATIOS = tuple(
    (stage, microbatch, min(1.0, 0.25 * stage + 0.1 * microbatch))
    for stage in range(RANKS)
    for microbatch in range(MICROBATCHES)
)
FREEZE_PLAN = FreezePlan(
    epoch=1, version=1, ratios=tuple((0.5,) * MICROBATCHES for _ in range(10)), start=PHASES.monitoring + 1
)


def freeze_share(step: int, ratio: float) -> float:
    """The share that is frozen at `step` of an action whose ratio is `ratio`."""
    phase = PHASES.of(step)
    if phase in (Phase.WARM_UP, Phase.UPPER):
        return 0.0
    return 1.0 if phase is Phase.LOWER else ratio * PHASES.share(step)


def solved() -> FreezeSolved:
    return FreezeSolved(
        plan=replace(FREEZE_PLAN, start=None),
        ratios=RATIOS,
        unfrozen_s=0.132,
        solved_s=0.1,
        all_frozen_s=0.088,
        outside_s=0.003,
        measured_unfrozen_s=0.136,
        measured_all_frozen_s=0.092,
        kappa=0.763,
        mean_per_stage=(0.35, 0.6, 0.8, 0.8),
        duals=(0.0, 0.0, 0.004, 0.02),
        critical=("3B0", "3B1"),
        solve_s=0.012,
    )


def freezing_records(*, steps: int = STEPS) -> list[Record]:
    """The log of a job with `freeze.method = "timelyfreeze"`, oldest record first."""
    random = Random(5)
    base = records(steps=steps)
    ratios = {(stage, microbatch): ratio for stage, microbatch, ratio in RATIOS}
    log: list[Record] = []
    for record in base:
        event = record.event
        if isinstance(event, Submitted):
            freeze = {
                "method": "timelyfreeze",
                "r_max": 0.8,
                "warm_up": PHASES.warm_up,
                "monitoring": PHASES.monitoring,
                "ramp": PHASES.ramp,
            }
            event = replace(event, spec={**event.spec, "freeze": freeze})
        if isinstance(event, TimelineReport):
            continue
        if isinstance(event, StepReport):
            share = freeze_share(event.step, 0.7)
            event = replace(
                event,
                step_s=event.step_s - 0.044 * share,
                effective_update=1 - 0.9 * share,
                gradient_energy=4.0 / event.step,
            )
            log += [
                Record(time_s=record.time_s, event=event)
                for event in _frozen_step(event.step, random, ratios, steps)
            ]
        if isinstance(event, SampleReport):
            passes = MICROBATCHES * max(steps - PHASES.middle, 0)
            log += [
                Record(time_s=record.time_s, event=_counts(rank, steps, passes, random))
                for rank in range(RANKS)
            ]
        log.append(Record(time_s=record.time_s, event=event))
        if isinstance(event, StepReport) and event.step == PHASES.monitoring:
            log.append(Record(time_s=record.time_s, event=solved()))
            log.append(Record(time_s=record.time_s, event=FreezeStarted(plan=FREEZE_PLAN)))
    return log


def _frozen_step(
    step: int, random: Random, ratios: dict[tuple[int, int], float], steps: int
) -> list[FreezeReport | TimelineReport]:
    """What the ranks report about `step` before the first rank reports the step itself."""
    reports: list[FreezeReport | TimelineReport] = []
    if step > PHASES.middle:
        for rank in range(RANKS):
            planned = [freeze_share(step, ratios[rank, microbatch]) for microbatch in range(MICROBATCHES)]
            drawn = [min(1.0, max(0.0, random.gauss(share, 0.05 * (0 < share < 1)))) for share in planned]
            actions = tuple(
                FrozenAction(
                    stage=rank,
                    microbatch=microbatch,
                    planned=share,
                    actual=drawn[microbatch],
                    parameters=drawn[microbatch],
                )
                for microbatch, share in enumerate(planned)
            )
            frozen = (round(sum(drawn)),) * 4
            counts = tuple((layer, frozen) for layer in range(*plan().layers[rank]))
            reports.append(
                FreezeReport(step=step, rank=rank, actions=actions, passes=MICROBATCHES, counts=counts)
            )
    if PHASES.of(step) in (Phase.UPPER, Phase.LOWER) or step == steps:
        reports += timelines(
            step, random, lambda stage, microbatch: freeze_share(step, ratios[stage, microbatch])
        )
    return reports


def _counts(rank: int, steps: int, passes: int, random: Random) -> FrozenCounts:
    counts = tuple(
        (layer, f"block.{name}", int(passes * min(1.0, max(0.0, random.gauss(0.7, 0.1)))))
        for layer in range(3)
        for name in ("attention.weight", "mlp.weight", "mlp.bias", "norm.weight")
    )
    return FrozenCounts(step=steps, rank=rank, passes=passes, counts=counts)
