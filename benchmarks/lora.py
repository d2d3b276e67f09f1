"""Adapters beside the whole model: bytes of a checkpoint and of a step's copies, step time, and what lives in memory at
most.

    python -m benchmarks.lora [--rounds N] [--steps N] [--rank R]

The LLaMA of `benchmarks.hugging_face` on one rank, trained whole and with adapters at query and value, each in a
process of its own, in turn. A round's step time is the median of its steps after the first two; the ratio is the median
over rounds. Memory is counted in a run of its own, as counting slows it down.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.hugging_face import hugging_face_job
from benchmarks.parts.configs import changed
from benchmarks.parts.targets import at_most
from benchmarks.parts.two_rank_job import WARM_UP
from workers.build import build_layers
from workers.checkpoint.folder import checkpoints, read_manifest
from workers.config import CheckpointConfig
from workers.copies.redundancy import Packing
from workers.launch.ranks import LaunchedJob, run_processes
from workers.models.registry import build_definition
from workers.protocol.reports import StepReport
from workers.state.optim import make_optimizer

MOST = 1.1
"""Most bytes of a checkpoint over those of the adapters' own states, and of a step's copies over their gradients."""
STATES = 3
"""Tensors of each trained parameter's shape: its value and AdamW's two moments."""


@dataclass(frozen=True)
class Figures:
    """Figures of one run."""

    step_s: float
    checkpoint_bytes: int
    kept_bytes: int
    """Of the files that checkpoints share."""
    peak_bytes: int


def job_of(lora: dict[str, Any] | None, steps: int, output: Path) -> LaunchedJob:
    job = hugging_face_job("llama", steps, output)
    model = type(job.config.model).model_validate({**job.config.model.model_dump(), "lora": lora})
    config = changed(job.config, model=model, checkpoint=CheckpointConfig(every_steps=2, keep=1))
    return replace(job, config=config)


def figures_of(lora: dict[str, Any] | None, steps: int, *, count_memory: bool = False) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        job = replace(job_of(lora, steps, Path(folder)), count_memory=count_memory)
        run = run_processes(job)
        times = [report.step_s for report in run.reports if isinstance(report, StepReport)][WARM_UP:]
        (newest, *_) = checkpoints(job.config.job.folder)
        files = read_manifest(newest).files.values()
        return Figures(
            step_s=median(times),
            checkpoint_bytes=sum(file.bytes for file in files),
            kept_bytes=sum(file.kept.bytes for file in files if file.kept is not None),
            peak_bytes=max((each.peak_bytes for each in run.memory), default=0),
        )


def adapter_bytes(lora: dict[str, Any] | None) -> tuple[int, int]:
    """Bytes of the parameters that are trained, in float32, and of the parcels that keep one copy of them in a step."""
    with tempfile.TemporaryDirectory() as folder:
        config = job_of(lora, 1, Path(folder)).config
        definition = build_definition(config.model, None)
        built = build_layers(
            definition,
            range(len(definition.layers)),
            seed=config.job.seed,
            precision=config.job.precision,
            device=torch.device("cpu"),
            optimizer=make_optimizer(config.optimizer, config.job.steps),
        )
        states = [state for _, state in built.values()]
        trained = sum(state.weights[name].nbytes for state in states for name in state.updates)
        return trained, sum(Packing(state).bytes for state in states)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rank", type=int, default=8)
    given = parser.parse_args()
    lora = {"rank": given.rank, "targets": ["q_proj", "v_proj"]}
    print(f"{date.today()}: a LLaMA of 4 blocks, whole and with adapters of rank {given.rank}")
    rounds = [(figures_of(None, given.steps), figures_of(lora, given.steps)) for _ in range(given.rounds)]
    whole, adapters = rounds[0]
    trained, parcels = adapter_bytes(lora)
    ratio = adapters.checkpoint_bytes / (STATES * trained)
    print(
        f"checkpoint: whole {whole.checkpoint_bytes / 1e6:.1f} MB, with adapters {adapters.checkpoint_bytes / 1e6:.2f}"
        f" MB, {at_most(f'{ratio:.3f}', ratio, MOST)} of their own states; once for all checkpoints"
        f" {adapters.kept_bytes / 1e6:.1f} MB"
    )
    ratio = parcels / trained
    print(
        f"copies of a step: whole {adapter_bytes(None)[1] / 1e6:.1f} MB, with adapters {parcels / 1e6:.3f} MB,"
        f" {at_most(f'{ratio:.3f}', ratio, MOST)} of their gradients"
    )
    ratios = [one.step_s / other.step_s for other, one in rounds]
    print(
        f"step: whole {median(each.step_s for each, _ in rounds):.3f} s, with adapters"
        f" {median(each.step_s for _, each in rounds):.3f} s, {median(ratios):.3f} of that"
    )
    counted = [figures_of(each, 4, count_memory=True).peak_bytes for each in (None, lora)]
    print(f"at most alive: whole {counted[0] / 1e6:.0f} MB, with adapters {counted[1] / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
