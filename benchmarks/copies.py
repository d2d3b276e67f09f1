"""What each copy of the layers costs a step in which nothing fails: `elastic.copies` 0, 1 and 2 beside each other.

    python -m benchmarks.copies [--rounds N] [--steps N] [--width W] [--layer-ms T]

Four emulated ranks, processes on this machine, each on a node of its own: computation waits, gradients and updates of
the copies are real. Each round runs all three variants; a ratio compares the median step after the first ones with that
of the same round's job with one copy less. The median over rounds is printed, and the bytes that a step sends.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.parts.two_rank_job import taken
from planner.plan import Plan
from planner.schedule.registry import build
from planner.search.standbys import assign
from workers.config import (
    CheckpointConfig,
    DataConfig,
    EmulatedConfig,
    ModelConfig,
    OptimizerConfig,
    WorkerConfig,
)
from workers.launch.ranks import Job

RANKS, BLOCKS, MICROBATCHES = 4, 10, 8
COPIES = (0, 1, 2)


def make(copies: int, steps: int, width: int, layer_s: float, folder: Path) -> Job:
    """GPT of ten blocks, three layers on each rank."""
    config = WorkerConfig(
        job="copies",
        seed=1,
        steps=steps,
        precision="float32",
        threads=1,
        validate_every=0,
        output=str(folder),
        device="emulated",
        microbatch_size=1,
        microbatches=MICROBATCHES,
        replicas=1,
        model=ModelConfig(family="gpt", layers=BLOCKS, width=width, heads=2, context=8),
        data=DataConfig(validation_fraction=0.0),
        optimizer=OptimizerConfig(),
        checkpoint=CheckpointConfig(),
        emulated=EmulatedConfig(forward_s=layer_s, input_grad_s=layer_s, weight_grad_s=layer_s),
    )
    per_rank = (BLOCKS + 2) // RANKS
    plan = Plan(
        epoch=1,
        version=1,
        reason="benchmark",
        layers=tuple((rank * per_rank, (rank + 1) * per_rank) for rank in range(RANKS)),
        stage_ranks=tuple(range(RANKS)),
        schedule="1f1b",
        chunks=1,
        microbatches=MICROBATCHES,
        replicas=1,
    )
    nodes = [f"node{rank}" for rank in range(RANKS)]
    standbys = assign(plan, nodes, (1,) * (BLOCKS + 2), copies) if copies else ()
    return Job(config, replace(plan, standbys=standbys), build("1f1b", RANKS, MICROBATCHES, 1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layer-ms", type=float, default=5.0)
    options = parser.parse_args()
    ratios: dict[int, list[float]] = {copies: [] for copies in COPIES[1:]}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            turn = number % len(COPIES)
            step_s = {
                copies: median(
                    taken(
                        make(
                            copies,
                            options.steps,
                            options.width,
                            options.layer_ms / 1e3,
                            Path(folder, f"{number}-{copies}"),
                        )
                    ).values()
                )
                for copies in (*COPIES[turn:], *COPIES[:turn])
            }
            for copies, of_rounds in ratios.items():
                of_rounds.append(step_s[copies] / step_s[copies - 1])
            told = ", ".join(f"{copies}: {step_s[copies] * 1e3:.1f} ms" for copies in COPIES)
            print(f"round {number + 1}: {told}", flush=True)
    # A block has 12 width^2 weights, of which every copy gets the gradients in float32.
    print(
        f"a copy sends {4 * 12 * options.width**2 * BLOCKS / 1e6:.1f} MB of the blocks' gradients in a step"
    )
    for copies, of_rounds in ratios.items():
        low, high = min(of_rounds), max(of_rounds)
        print(
            f"{copies} instead of {copies - 1}: {median(of_rounds):.3f} of the step ({low:.3f} to {high:.3f})"
        )


if __name__ == "__main__":
    main()
