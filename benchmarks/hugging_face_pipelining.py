"""Two ranks beside `torch.distributed.pipelining` over the same layers of transformers' modules.

    python -m benchmarks.hugging_face_pipelining [--models llama,gpt2,...] [--rounds N] [--steps N]

The models of `benchmarks.hugging_face`, cut in the middle, under 1F1B: same layers, batches, optimizer, transport. Our
rounds and theirs alternate; a round's figure is the median of its steps after the first two, and the ratio is the
median over rounds of our throughput over theirs.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median

import torch

from benchmarks.hugging_face import MICROBATCHES, MODELS, hugging_face_job
from benchmarks.parts.targets import at_least
from benchmarks.parts.two_rank_job import RANKS, WARM_UP
from benchmarks.pipelining import ours, theirs
from planner.schedule.registry import build
from workers.launch.ranks import LaunchedJob

LEAST, MOST_APART = 1.0, 1e-3


def two_rank_job(name: str, steps: int, output: Path) -> LaunchedJob:
    """The job of two ranks that train the model `name`, with as many layers each."""
    job = hugging_face_job(name, steps, output)
    layers = job.plan.layers[-1][1]
    plan = replace(job.plan, layers=((0, layers // 2), (layers // 2, layers)), stage_ranks=(0, 1))
    return replace(job, plan=plan, schedule=build("1f1b", RANKS, MICROBATCHES, 1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; torch {torch.__version__}; {date.today()}")
    for name in options.models.split(","):
        ratios, own_s, their_s = list[float](), list[float](), list[float]()
        for number in range(options.rounds):
            with tempfile.TemporaryDirectory() as folder:
                job = two_rank_job(name, options.steps, Path(folder))
                # Each comes first in every other round.
                runs = {side: side(job) for side in ((ours, theirs) if number % 2 == 0 else (theirs, ours))}
            apart = max(abs(a - b) for a, b in zip(runs[ours].losses, runs[theirs].losses, strict=True))
            assert apart < MOST_APART, f"{name}: the losses are {apart} apart: not the same training"
            own_s.append(median(runs[ours].taken_s[WARM_UP:]))
            their_s.append(median(runs[theirs].taken_s[WARM_UP:]))
            ratios.append(their_s[-1] / own_s[-1])
        text = (
            f"{name}: ours {1e3 * median(own_s):.0f} ms, theirs {1e3 * median(their_s):.0f} ms a step; throughput over"
            f" theirs {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        )
        print(at_least(text, median(ratios), LEAST), flush=True)


if __name__ == "__main__":
    main()
