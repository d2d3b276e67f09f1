"""Replicas that share out optimizer states beside replicas that do not: step time, and memory as counted and predicted.

    python -m benchmarks.sharded [--rounds N] [--steps N] [--layers N] [--width N] [--precision P]

Two pipelines of one CPU rank each, of one thread; GPT with context 128, 4 microbatches of 4 per replica, AdamW. Each
round runs both in turn; a round's figure is the median of its steps after the first two, and the ratio is the median
over rounds. Then each runs once with its storages counted. Both end with the same bits, or the benchmark fails.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.parts.targets import at_most
from benchmarks.parts.two_rank_job import WARM_UP, make_job, profile_of, taken
from planner.schedule.registry import build
from planner.simulation.predict import predict
from workers.config import ModelConfig
from workers.launch.ranks import Job, run_processes

MOST = 1.03
"""Asked of the step with shared states over that with whole ones."""
CLOSE = 0.03
"""Asked of memory as counted beside predicted."""
VARIANTS = ("none", "optimizer")


def two_pipelines(shard: str, options: argparse.Namespace, output: Path, **changes: Any) -> Job:
    """Two replicas in two pipelines of one rank."""
    model = ModelConfig(family="gpt", layers=options.layers, width=options.width, heads=4, context=128)
    job = make_job(
        "1f1b",
        options.steps,
        output,
        model=model,
        replicas=2,
        microbatches=4,
        precision=options.precision,
        **changes,
    )
    plan = replace(job.plan, layers=((0, options.layers + 2),), stage_ranks=(0,), replicas=2, shard=shard)
    return replace(job, plan=plan, schedule=build("1f1b", 1, job.config.microbatches, 1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16", "float16"])
    options = parser.parse_args()
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; torch {torch.__version__};"
        f" {date.today()}; {options.precision}"
    )
    ratios: list[float] = []
    for number in range(options.rounds):
        order = VARIANTS if number % 2 == 0 else VARIANTS[::-1]
        steps_s: dict[str, float] = {}
        for shard in order:
            with tempfile.TemporaryDirectory() as folder:
                steps_s[shard] = median(taken(two_pipelines(shard, options, Path(folder))).values())
        ratios.append(steps_s["optimizer"] / steps_s["none"])
        print(f"  {1e3 * steps_s['none']:.1f} ms, shared {1e3 * steps_s['optimizer']:.1f} ms", flush=True)
    said = f"a step with shared states over one with whole ones: {median(ratios):.3f}"
    print(at_most(f"{said} ({min(ratios):.3f} to {max(ratios):.3f})", median(ratios), MOST))
    digests: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        profile = profile_of(two_pipelines("none", options, Path(folder)))
    for shard in VARIANTS:
        with tempfile.TemporaryDirectory() as folder:
            job = two_pipelines(shard, options, Path(folder), timeline_every=1)
            run = run_processes(replace(job, count_memory=True))
        digests.add(run.state_sha256)
        # After the last step the checkpoint is copied.
        counted = max(one.peak_bytes for one in run.memory if WARM_UP < one.step < options.steps)
        predicted = predict(profile, job.plan, job.schedule).peak_memory_bytes
        off = counted / predicted - 1
        text = (
            f"memory with shard = {shard!r}: {counted / 1e6:.1f} MB counted, {off:+.1%} of what is predicted"
        )
        print(at_most(text, abs(off), CLOSE))
    if len(digests) > 1:
        raise SystemExit("the two end with different bits")
    print(f"both end with state_sha256 {digests.pop()}")


if __name__ == "__main__":
    main()
