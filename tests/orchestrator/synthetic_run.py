"""The event log of a believable job: 1F1B on four ranks, with noise, a slow first step and a skipped one."""

from __future__ import annotations

import math
from random import Random
from typing import Any

from orchestrator.events import Event, Finished, Formed, Issued, RankStarted, Record, Submitted
from planner.plan import Plan
from workers.protocol import (
    CheckpointReport,
    Generation,
    SampleReport,
    Span,
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


def timelines(step: int, random: Random) -> list[TimelineReport]:
    """What each rank did, on a clock where a forward takes about 4 ms and a backward 8 ms."""
    programs = [one_f_one_b(rank) for rank in range(RANKS)]
    done: dict[str, float] = {}
    spans: list[list[Span]] = [[] for _ in range(RANKS)]
    while any(len(spans[rank]) < len(programs[rank]) for rank in range(RANKS)):
        for rank in range(RANKS):
            if len(spans[rank]) == len(programs[rank]):
                continue
            token = programs[rank][len(spans[rank])]
            kind, index = token[1], token[2:]
            source = rank - 1 if kind == "F" else rank + 1
            needs = f"{source}{kind}{index}" if 0 <= source < RANKS else None
            if needs is not None and needs not in done:
                continue
            free = spans[rank][-1].end_s if spans[rank] else 0.001
            start_s = max(free, done[needs] + 0.0004 if needs else 0.0)
            end_s = start_s + (0.004 if kind == "F" else 0.008) * random.uniform(0.93, 1.1)
            done[token] = end_s
            spans[rank].append(Span(action=token, start_s=start_s, end_s=end_s))
    step_s = max(done.values()) + 0.003
    return [
        TimelineReport(step=step, rank=rank, step_s=step_s, spans=tuple(spans[rank])) for rank in range(RANKS)
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
    """The whole log, oldest record first."""
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
    put(Formed(generation=generation, start=None))
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
