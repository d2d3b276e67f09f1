"""What each copy of the layers costs a step in which nothing fails: `elastic.copies` 0, 1 and 2 beside each other, and
a snapshot every few steps.

    python -m benchmarks.copies [--ranks N] [--rounds N] [--steps N] [--width W] [--layer-ms T] [--every K]

Emulated ranks, processes on this machine, each on a node of its own: computation waits, what is sent and updated is
real. Each round runs all variants; a ratio compares the mean step after the first ones with that of the same round's
job with one copy less, that with snapshots with no copy. The median over rounds is printed, and the bytes that a step
sends.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import mean, median

from benchmarks.parts.two_rank_job import taken
from planner.plan import Plan
from planner.schedule.registry import build
from planner.search.standbys import protected
from workers.config import (
    ClusterConfig,
    DataConfig,
    EmulatedConfig,
    JobConfig,
    ModelConfig,
    PipelineConfig,
    WorkerConfig,
)
from workers.launch.ranks import LaunchedJob

PER_RANK, MICROBATCHES = 3, 8


def make(copies: int, every: int, options: argparse.Namespace, folder: Path) -> LaunchedJob:
    """GPT with three layers on each rank."""
    ranks, layer_s = options.ranks, options.layer_ms / 1e3
    blocks = PER_RANK * ranks - 2
    config = WorkerConfig(
        job=JobConfig(
            name="copies", seed=1, steps=options.steps, timeline_every=0, sample_tokens=0, output=str(folder)
        ),
        model=ModelConfig(family="gpt", layers=blocks, width=options.width, heads=2, context=8),
        data=DataConfig(validation_fraction=0.0),
        pipeline=PipelineConfig(microbatch_size=1, microbatches=MICROBATCHES),
        cluster=ClusterConfig(
            device="emulated",
            emulated=EmulatedConfig(forward_s=layer_s, input_grad_s=layer_s, weight_grad_s=layer_s),
        ),
    )
    plan = Plan(
        epoch=1,
        version=1,
        reason="benchmark",
        layers=tuple((rank * PER_RANK, (rank + 1) * PER_RANK) for rank in range(ranks)),
        stage_ranks=tuple(range(ranks)),
        schedule="1f1b",
        chunks=1,
        microbatches=MICROBATCHES,
        replicas=1,
    )
    nodes = [f"node{rank}" for rank in range(ranks)]
    plan = protected(plan, nodes, (1,) * (blocks + 2), copies, every)
    return LaunchedJob(config, plan, build("1f1b", ranks, MICROBATCHES, 1), secret=b"benchmark")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--every", type=int, default=4, help="steps between two snapshots")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layer-ms", type=float, default=5.0)
    options = parser.parse_args()
    variants = {"0": (0, 1), "1": (1, 1), "2": (2, 1), f"1 every {options.every}": (1, options.every)}
    names = [*variants]
    before = dict(zip(names, (None, "0", "1", "0"), strict=True))
    ratios: dict[str, list[float]] = {name: [] for name, other in before.items() if other is not None}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            turn = number % len(names)
            step_s: dict[str, float] = {}
            for name in (*names[turn:], *names[:turn]):
                made = make(*variants[name], options, Path(folder, f"{number}-{name}"))
                step_s[name] = mean(taken(made).values())
            for name, of_rounds in ratios.items():
                of_rounds.append(step_s[name] / step_s[before[name] or ""])
            told = ", ".join(f"{name}: {step_s[name] * 1e3:.1f} ms" for name in names)
            print(f"round {number + 1}: {told}", flush=True)
    # A block has 12 width^2 weights, of which every copy gets the gradients in float32, a snapshot also the moments.
    sent_mb = 4 * 12 * options.width**2 * (PER_RANK * options.ranks - 2) / 1e6
    print(
        f"{options.ranks} ranks; a copy sends {sent_mb:.1f} MB of the blocks' gradients in a step, a snapshot"
        f" {3 * sent_mb:.1f} MB of states in {options.every}"
    )
    for name, of_rounds in ratios.items():
        low, high = min(of_rounds), max(of_rounds)
        print(
            f"{name} instead of {before[name]}: {median(of_rounds):.3f} of the step ({low:.3f} to {high:.3f})"
        )


if __name__ == "__main__":
    main()
