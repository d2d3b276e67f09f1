"""Replicas that share out optimizer states, or sums of gradients too, beside replicas that do not: step time as
measured and predicted, memory as counted and predicted.

    python -m benchmarks.sharded [--rounds N] [--steps N] [--layers N] [--width N] [--precision P]

Two pipelines of one CPU rank each, of one thread; GPT with context 128, 4 microbatches of 4 per replica, AdamW. Each
round runs all in turn; a round's figure is the median of its steps after the first two, and the ratio is the median
over rounds. Then each runs once with its storages counted. The first two end with the same bits, and the third with
those of one pipeline that adds gradients up in its order, or the benchmark fails.
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
from planner.profile import Profile
from planner.schedule.registry import build
from planner.simulation.predict import predict
from workers.config import ModelConfig
from workers.launch.ranks import LaunchedJob, run_processes

MOST = 1.03
"""Asked of the step with shared states over that with whole ones."""
CLOSE = 0.03
"""Asked of memory as counted beside predicted."""
VARIANTS = ("none", "optimizer", "gradients")


def two_pipelines(shard: str, options: argparse.Namespace, output: Path, **changes: Any) -> LaunchedJob:
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
    with tempfile.TemporaryDirectory() as folder:
        profile = profile_of(two_pipelines("none", options, Path(folder)))
    show_times(profile, options)
    digests = {shard: show_memory(profile, shard, options) for shard in VARIANTS}
    if digests["none"] != digests["optimizer"]:
        raise SystemExit("shared optimizer states end with other bits")
    with tempfile.TemporaryDirectory() as folder:
        work = two_pipelines("gradients", options, Path(folder), timeline_every=1)
        alone = run_processes(replace(work, plan=replace(work.plan, pipelines=1)))
    if digests["gradients"] != alone.state_sha256:
        raise SystemExit("shared sums of gradients end with other bits than one pipeline's")
    print(
        f"the first two end with state_sha256 {digests['none']}, the third and one pipeline with {alone.state_sha256}"
    )


def show_times(profile: Profile, options: argparse.Namespace) -> None:
    ratios: dict[str, list[float]] = {shard: [] for shard in VARIANTS[1:]}
    for number in range(options.rounds):
        order = VARIANTS if number % 2 == 0 else VARIANTS[::-1]
        steps_s: dict[str, float] = {}
        for shard in order:
            with tempfile.TemporaryDirectory() as folder:
                steps_s[shard] = median(taken(two_pipelines(shard, options, Path(folder))).values())
        for shard, found in ratios.items():
            found.append(steps_s[shard] / steps_s["none"])
        print("  " + ", ".join(f"{shard} {1e3 * steps_s[shard]:.1f} ms" for shard in VARIANTS), flush=True)
    predicted_s: dict[str, float] = {}
    for shard in VARIANTS:
        with tempfile.TemporaryDirectory() as folder:
            job = two_pipelines(shard, options, Path(folder))
        predicted_s[shard] = predict(profile, job.plan, job.schedule).step_s
    for shard, found in ratios.items():
        said = (
            f"a step with shard = {shard!r} over one with whole states: {median(found):.3f} ({min(found):.3f} to"
            f" {max(found):.3f}), predicted {predicted_s[shard] / predicted_s['none']:.3f}"
        )
        print(at_most(said, median(found), MOST) if shard == "optimizer" else said)


def show_memory(profile: Profile, shard: str, options: argparse.Namespace) -> str:
    """Returns the run's `state_sha256`."""
    with tempfile.TemporaryDirectory() as folder:
        job = two_pipelines(shard, options, Path(folder), timeline_every=1)
        run = run_processes(replace(job, count_memory=True))
    # After the last step the checkpoint is copied.
    counted = max(one.peak_bytes for one in run.memory if WARM_UP < one.step < options.steps)
    predicted = predict(profile, job.plan, job.schedule).peak_memory_bytes
    off = counted / predicted - 1
    text = f"memory with shard = {shard!r}: {counted / 1e6:.1f} MB counted, {off:+.1%} of what is predicted"
    print(at_most(text, abs(off), CLOSE))
    return run.state_sha256


if __name__ == "__main__":
    main()
