"""What redundancy costs a job in which nothing fails: copies on another rank, live or as a base and a log, snapshots of
every few steps, and background checkpoints.

    python -m benchmarks.redundancy [--schedule 1f1b] [--rounds N] [--steps N] [--only peer host]

The job is that of `benchmarks.pipelining`: two CPU ranks of one thread. Each round runs all variants. A
ratio compares the mean step after the first two with that of the same round's job without copies and
checkpoints. The median over rounds is printed. A second figure compares, within one run, the steps in which a
checkpoint is written with the others, so the machine's drift from run to run does not affect it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

from benchmarks.parts.two_rank_job import make_job, taken
from planner.search.standbys import protected
from workers.config import CheckpointConfig
from workers.launch.ranks import LaunchedJob

EVERY = 20
"""Steps between checkpoints."""
WRITING = 3
"""Steps that writing a checkpoint may take. Writing begins before the first of them."""
COPY_EVERY = 4
VARIANTS = ("none", "peer", "host", "snapshots", "checkpoints")


def with_copies(job: LaunchedJob, every: int) -> LaunchedJob:
    """`job` with a copy of every layer on the other rank, as new as the layer or taken every so many steps."""
    plan = job.plan
    layers = plan.layers[-1][1]
    plan = protected(plan, [f"node {rank}" for rank in range(plan.world_size)], (1,) * layers, 1, every)
    return replace(job, plan=plan, secret=b"benchmark")


def on_host(job: LaunchedJob) -> LaunchedJob:
    """`job` whose ranks keep copies in host memory, as ranks on GPUs do."""
    elastic = job.config.elastic.model_copy(update={"copies_in": "host"})
    return replace(job, config=job.config.model_copy(update={"elastic": elastic}))


def make(variant: str, schedule: str, steps: int, folder: Path) -> LaunchedJob:
    """The job of one variant."""
    every = EVERY if variant == "checkpoints" else 0
    job = make_job(schedule, steps, folder, checkpoint=CheckpointConfig(every_steps=every))
    if variant == "host":
        return with_copies(on_host(job), 1)
    return {"peer": with_copies(job, 1), "snapshots": with_copies(job, COPY_EVERY)}.get(variant, job)


def added_s(taken_s: Mapping[int, float]) -> float:
    """Seconds that a checkpoint adds to the steps in which it is written."""
    whole = range(EVERY, max(taken_s) - WRITING + 1, EVERY)
    writing = {step + i for step in whole for i in range(1, WRITING + 1)}
    calm = median(took_s for step, took_s in taken_s.items() if step not in writing)
    return sum(taken_s[step] - calm for step in writing) / len(whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=44)
    parser.add_argument("--only", nargs="+", choices=VARIANTS[1:], default=VARIANTS[1:])
    arguments = parser.parse_args()
    variants = ("none", *arguments.only)
    shares: list[float] = []
    ratios: dict[str, list[float]] = {variant: [] for variant in variants[1:]}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            turn = number % len(variants)
            step_s: dict[str, float] = {}
            for variant in (*variants[turn:], *variants[:turn]):
                job = make(variant, arguments.schedule, arguments.steps, Path(folder))
                taken_s = taken(job)
                step_s[variant] = mean(taken_s.values())
                if variant == "checkpoints":
                    shares.append(added_s(taken_s) / (EVERY * step_s[variant]))
            for variant, of_rounds in ratios.items():
                of_rounds.append(step_s[variant] / step_s["none"])
            told = ", ".join(f"{variant} {seconds * 1e3:.1f} ms" for variant, seconds in step_s.items())
            print(f"round {number + 1}: {told}", flush=True)
    if shares:
        low, high = min(shares), max(shares)
        print(
            f"a checkpoint adds {median(shares):.2%} to {EVERY} steps of its own run ({low:.2%} to {high:.2%})"
        )
    for variant, of_rounds in ratios.items():
        low, high = min(of_rounds), max(of_rounds)
        print(f"{variant}: {median(of_rounds):.3f} of the step without ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
