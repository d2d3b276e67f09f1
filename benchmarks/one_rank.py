"""One rank beside a plain loop of the same model in one process: what the engine costs where there is no pipeline.

    python -m benchmarks.one_rank [--rounds N] [--steps N] [--layers N] [--width N]
    python -m benchmarks.one_rank --gpu [--precision bfloat16] [--family llama] [--compile]

GPT with context 128, 8 microbatches of 4, AdamW without clipping, one thread, each in a process of its own, in turn.
The plain loop is what a user would write: one graph per microbatch, `loss.backward()`, `optimizer.step()`; in 16 bits
under autocast. A round's figure is the median of its steps after the first two; the ratio is the median over rounds.
Below it, where the time of a step goes: forward, backward, and the rest (the update; with us also the norms and the
commit). `--gpu`: width 2048, context 1024, 8 microbatches of 8, a vocabulary of 32,768 on the first GPU, and the share
of its published rate (MFU): 6 multiplications and additions per parameter of a product and token, and those of causal
attention. `--family llama`: four query heads share a head of keys and values.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from benchmarks.parts.marks import Marks
from benchmarks.parts.targets import at_least
from benchmarks.parts.two_rank_job import WARM_UP, make_job
from planner.accelerators import ACCELERATORS
from planner.ir import Action, ActionKind
from planner.schedule.registry import build
from workers.build import build_module
from workers.config import ModelConfig, WorkerConfig
from workers.data.registry import open_dataset
from workers.data.sampling import train_indices
from workers.launch.processes import forkserver
from workers.launch.ranks import LaunchedJob, run_processes
from workers.models.registry import build_definition
from workers.protocol.reports import StepReport, TimelineReport

ModelFamily = Literal["gpt", "llama"]
GOAL = 1.0
PARTS = ("forward", "backward", "rest")


@dataclass(frozen=True)
class Steps:
    """The steps after the first ones: seconds of each, and of its parts; and the last loss."""

    taken_s: list[float]
    parts_s: Mapping[str, list[float]]
    loss: float


def one_rank_job(
    steps: int,
    output: Path,
    layers: int,
    width: int,
    precision: str,
    *,
    gpu: bool,
    family: ModelFamily = "gpt",
    compiled: bool = False,
) -> LaunchedJob:
    model = ModelConfig(family=family, layers=layers, width=width, heads=4, context=128)
    size: dict[str, Any] = {"precision": precision, "compile": compiled}
    if gpu:
        large = {"heads": width // 128, "context": 1024, "vocabulary": 32768}
        size |= {"device": "cuda", "microbatch_size": 8}
        model = model.model_copy(update=large)
    if family == "llama":
        model = model.model_copy(update={"kv_heads": model.heads // 4, "hidden": 8 * width // 3 // 32 * 32})
    job = make_job("1f1b", steps, output, model=model, timeline_every=1, **size)
    plan = replace(job.plan, layers=((0, layers + 2),), stage_ranks=(0,))
    return replace(job, plan=plan, schedule=build("1f1b", 1, job.config.microbatches, 1))


def flops_per_step(config: WorkerConfig) -> float:
    """Forward and backward, of the matrix products and of attention's lower half."""
    model = config.model
    assert model.vocabulary is not None
    if model.family == "llama":
        assert model.kv_heads is not None
        assert model.hidden is not None
        shared = model.kv_heads / model.heads
        per_layer = (2 + 2 * shared) * model.width**2 + 3 * model.width * model.hidden
    else:
        per_layer = 12 * model.width**2
    products = model.layers * per_layer + model.vocabulary * model.width
    attention = model.layers * model.context * model.width
    return 6 * (products + attention) * config.microbatches * config.pipeline.microbatch_size * model.context


def ours(job: LaunchedJob) -> Steps:
    run = run_processes(job)
    steps = [r for r in run.reports if isinstance(r, StepReport)]
    timelines = {r.step: r.spans for r in run.reports if isinstance(r, TimelineReport)}
    taken: list[float] = []
    parts: dict[str, list[float]] = {part: [] for part in PARTS}
    for report in steps[WARM_UP:]:
        taken.append(report.step_s)
        spans = timelines[report.step]
        kinds = [(Action.parse(span.action).kind, span.end_s - span.start_s) for span in spans]
        parts["forward"].append(sum(s for kind, s in kinds if kind is ActionKind.FORWARD))
        parts["backward"].append(sum(s for kind, s in kinds if kind is not ActionKind.FORWARD))
        parts["rest"].append(report.step_s - parts["forward"][-1] - parts["backward"][-1])
    return Steps(taken, parts, steps[-1].loss)


def _loop(job: LaunchedJob, pipe: Connection) -> None:
    torch.set_num_threads(1)
    config = job.config
    device = torch.device(config.device)
    data = open_dataset(config.data, config.model, config.job.folder)
    definition = build_definition(config.model, data.vocabulary)
    layers = [build_module(definition, i, config.job.seed).train() for i in range(len(definition.layers))]
    model = torch.nn.Sequential(*layers).to(device)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    settings = config.optimizer
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
    )
    total, size = config.microbatches, config.pipeline.microbatch_size
    marks = Marks(device)
    taken: list[float] = []
    parts: dict[str, list[float]] = {part: [] for part in PARTS}
    loss = torch.zeros((), device=device)
    for step in range(config.job.steps):
        begun = marks.mark()
        loss = torch.zeros((), device=device)
        passes: list[tuple[Any, Any, Any]] = []
        for microbatch in range(total):
            samples = train_indices(
                config.job.seed, step, microbatch, total, size, data.dataset.train_samples
            )
            batch = data.dataset.train(samples)
            before = marks.mark()
            with (
                nullcontext()
                if config.job.precision == "float32"
                else torch.autocast(device.type, torch.bfloat16)
            ):
                outputs = model(*(t.to(device) for t in batch.inputs))
                found = definition.loss(outputs, *(t.to(device) for t in batch.targets)) / total
            between = marks.mark()
            found.backward()
            passes.append((before, between, marks.mark()))
            loss += found.detach()
        optimizer.step()
        optimizer.zero_grad()
        ended = marks.mark()
        if step >= WARM_UP:
            taken.append(marks.between_s(begun, ended))
            parts["forward"].append(sum(marks.between_s(before, between) for before, between, _ in passes))
            parts["backward"].append(sum(marks.between_s(between, after) for _, between, after in passes))
            parts["rest"].append(taken[-1] - parts["forward"][-1] - parts["backward"][-1])
    pipe.send(Steps(taken, parts, float(loss)))


def plain(job: LaunchedJob) -> Steps:
    context: Any = forkserver()
    here, there = context.Pipe()
    process = context.Process(target=_loop, args=(job, there))
    process.start()
    there.close()
    steps: Steps = here.recv()
    process.join()
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, help="256 on a CPU, 2048 on a GPU")
    parser.add_argument(
        "--precision", choices=("float32", "bfloat16", "bfloat16-autocast"), default="float32"
    )
    parser.add_argument("--family", choices=("gpt", "llama"), default="gpt")
    parser.add_argument("--compile", action="store_true", help="our layers")
    parser.add_argument("--gpu", action="store_true", help="on this machine's first GPU")
    options = parser.parse_args()
    width = options.width or (2048 if options.gpu else 256)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; torch {torch.__version__};"
        f" {torch.cuda.get_device_name() + '; ' if options.gpu else ''}{options.family}, {options.precision}"
        f"{', our layers compiled' if options.compile else ''};"
        f" {date.today()}"
    )
    ratios: list[float] = []
    parts: dict[str, tuple[list[float], list[float]]] = {part: ([], []) for part in PARTS}
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            job = one_rank_job(
                options.steps,
                Path(folder),
                options.layers,
                width,
                options.precision,
                gpu=options.gpu,
                family=options.family,
                compiled=options.compile,
            )
            # Each comes first in every other round.
            order = (plain, ours) if number % 2 else (ours, plain)
            found = {run: run(job) for run in order}
        theirs, own = found[plain], found[ours]
        near = 1e-3 if options.precision == "float32" else 2e-2
        assert abs(own.loss - theirs.loss) < near * theirs.loss, (own.loss, theirs.loss)
        ratios.append(median(theirs.taken_s) / median(own.taken_s))
        print(
            f"round {number}: ours {1e3 * median(own.taken_s):.0f} ms, plain {1e3 * median(theirs.taken_s):.0f} ms a"
            f" step, {ratios[-1]:.3f} of its throughput",
            flush=True,
        )
        if options.gpu:
            h100 = ACCELERATORS["h100"]
            peak = h100.float32_flops if options.precision == "float32" else h100.half_flops
            rates = [flops_per_step(job.config) / median(found.taken_s) for found in (own, theirs)]
            print(
                f"  ours {rates[0] / 1e12:.0f} TFLOP/s, MFU {100 * rates[0] / peak:.1f} %; plain"
                f" {rates[1] / 1e12:.0f} TFLOP/s, MFU {100 * rates[1] / peak:.1f} % of an H100's"
                f" {peak / 1e12:.0f}",
                flush=True,
            )
        for part, (of_ours, of_theirs) in parts.items():
            of_ours.append(median(own.parts_s[part]))
            of_theirs.append(median(theirs.parts_s[part]))
    text = f"throughput over the plain loop's {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
    print(at_least(text, median(ratios), GOAL))
    for part, (of_ours, of_theirs) in parts.items():
        print(f"  {part}: ours {1e3 * median(of_ours):.1f} ms, plain {1e3 * median(of_theirs):.1f} ms")


if __name__ == "__main__":
    main()
