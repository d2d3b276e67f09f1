"""Packing beside padding on documents of log-normal lengths: tokens per second that the loss asks for.

    python -m benchmarks.packing [--rounds N] [--steps N] [--length T]

The LLaMA of `benchmarks.hugging_face` on one rank, with samples of T tokens: each holds one document and padding, or as
many whole documents as fit. Half of the documents are longer than an eighth of T (sigma 0.8, at most T). Both ways take
the same number of samples in a step, so the lengths predict that packing asks for as many times more tokens per second
as its samples are fuller. Each runs in a process of its own, in turn. A round's figure is the median over its steps
after the first two; the ratio is the median over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks.hugging_face import LENGTH, hugging_face_job
from benchmarks.parts.configs import changed
from benchmarks.parts.targets import at_least
from benchmarks.parts.two_rank_job import WARM_UP
from workers.config import DataConfig
from workers.data.registry import open_dataset
from workers.data.sampling import samples_at
from workers.launch.ranks import LaunchedJob, run_processes
from workers.models.loss import IGNORED
from workers.protocol.reports import StepReport

DOCUMENTS, SIGMA = 4000, 0.8
LEAST = 0.95
"""Least of the ratio over what the lengths predict."""


@dataclass(frozen=True)
class Figures:
    """Figures of one run."""

    filled: float
    """Share of the places of a step that the loss asks for, on average."""
    asked_per_s: float
    """Tokens that it asks for in a second."""
    step_s: float


def write_documents(file: Path, length: int) -> None:
    """Texts of which a token each is a byte."""
    numbers = np.random.default_rng(0)
    lengths = np.clip(numbers.lognormal(np.log(length / 8), SIGMA, DOCUMENTS), 2, length).astype(int)
    letters = numbers.integers(ord("a"), ord("z") + 1, (DOCUMENTS, length), dtype=np.uint8)
    with file.open("w") as out:
        for size, row in zip(lengths, letters, strict=True):
            out.write(json.dumps({"text": row[:size].tobytes().decode()}) + "\n")


def job_of(pack: bool, steps: int, length: int, folder: Path) -> LaunchedJob:
    job = hugging_face_job("llama", steps, folder / "run")
    model: Any = job.config.model
    fields = {**model.config, "max_position_embeddings": length}
    data = DataConfig(
        source="table",
        task="language",
        path=str(folder / "documents.jsonl"),
        cache=str(folder / "cache"),
        validation_fraction=0.0,
        pack=pack,
    )
    model = model.model_copy(update={"context": length, "config": fields})
    return replace(job, config=changed(job.config, model=model, data=data))


def asked_in_steps(job: LaunchedJob) -> list[int]:
    """Tokens that the loss asks for in each step."""
    config = job.config
    dataset = open_dataset(config.data, config.model, config.job.folder).dataset
    course = config.course()
    return [
        sum(
            int((target != IGNORED).sum())
            for g in range(config.microbatches)
            for target in dataset.train(
                samples_at(config.job.seed, course.positions(step + 1, g), dataset.train_samples)
            ).targets
        )
        for step in range(config.job.steps)
    ]


def figures_of(pack: bool, steps: int, length: int, folder: Path) -> Figures:
    job = job_of(pack, steps, length, folder)
    asked = asked_in_steps(job)[WARM_UP:]
    taken = [report.step_s for report in run_processes(job).reports if isinstance(report, StepReport)]
    per_s = [tokens / step_s for tokens, step_s in zip(asked, taken[WARM_UP:], strict=True)]
    places = job.config.microbatches * job.config.pipeline.microbatch_size * length
    return Figures(filled=mean(asked) / places, asked_per_s=median(per_s), step_s=median(taken[WARM_UP:]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--length", type=int, default=LENGTH)
    given = parser.parse_args()
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {date.today()}; samples of {given.length} tokens"
    )
    found: dict[bool, list[Figures]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as name:
        write_documents(Path(name) / "documents.jsonl", given.length)
        for number in range(given.rounds):
            # Each comes first in every other round.
            for pack in (True, False) if number % 2 else (False, True):
                found[pack].append(figures_of(pack, given.steps, given.length, Path(name)))
    for pack, what in ((False, "padded"), (True, "packed")):
        of = found[pack]
        print(
            f"{what}: {of[0].filled:.1%} of the places asked for, {median(each.step_s for each in of):.3f} s a step,"
            f" {median(each.asked_per_s for each in of):.0f} tokens per s"
        )
    ratios = [
        one.asked_per_s / other.asked_per_s for one, other in zip(found[True], found[False], strict=True)
    ]
    predicted = found[True][0].filled / found[False][0].filled
    over = median(ratios) / predicted
    print(
        f"packed over padded: {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), by the lengths"
        f" {predicted:.3f}"
    )
    print(at_least(f"measured over predicted: {over:.3f}", over, LEAST))


if __name__ == "__main__":
    main()
