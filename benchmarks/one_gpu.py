"""Training on one GPU: the same bits in any number of stages, and the step and memory that a profile predicts.

    python -m benchmarks.one_gpu [--parts bits,predicted] [--layers N] [--precisions ...]

`bits`: GPT of width 1024, context 512, 8 microbatches of 4, in one, two and four processes on the first GPU, over
several schedules, with and without recomputation, in every precision: one state_sha256.
`predicted`: GPT of width 2048, context 1024, a vocabulary of 32,768, 8 microbatches of 8, in one process: the step and
the peak memory that its measured profile predicts over those that it takes; likewise those of the profile on paper,
from the data sheet, and what each kind of pass takes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from benchmarks.one_rank import one_rank_job
from benchmarks.parts.two_rank_job import WARM_UP, make_job, profile_of
from planner.accelerators import ACCELERATORS
from planner.ir import Action, ActionKind
from planner.profile import DeviceProfile, Link, Profile
from planner.schedule.passes import add_recompute
from planner.schedule.registry import build, families
from planner.simulation.predict import predict
from workers.config import ModelConfig, OptimizerConfig
from workers.data.registry import open_dataset
from workers.launch.ranks import LaunchedJob, run_processes
from workers.models.registry import build_definition
from workers.profiling.on_paper import profile_on_paper
from workers.protocol.reports import StepReport, TimelineReport

PRECISIONS = ("float32", "bfloat16", "bfloat16-autocast", "float16")
CASES = ((1, "1f1b", False), (2, "zb-h1", False), (2, "zbv", True), (4, "1f1b", True), (4, "zb-h1", False))
"""(ranks, schedule, whether every stage recomputes)."""
STEPS = 4


def cut_job(
    precision: str, ranks: int, schedule: str, *, again: bool, layers: int, output: Path
) -> LaunchedJob:
    model = ModelConfig(family="gpt", layers=layers, width=1024, heads=16, context=512, dropout=0.1)
    optimizer = OptimizerConfig(lr=1e-3, clip_norm=1.0, min_lr_fraction=1.0)
    job = make_job(
        schedule, STEPS, output, model=model, device="cuda", precision=precision, optimizer=optimizer
    )
    family = families()[schedule]
    chunks = family.default_chunks
    stages = family.stages(ranks, chunks)
    total = layers + 2
    cuts = [total * stage // stages for stage in range(stages + 1)]
    table = build(schedule, ranks, job.config.microbatches, chunks)
    plan = replace(
        job.plan,
        layers=tuple(pairwise(cuts)),
        stage_ranks=family.placement(ranks, chunks),
        recompute=tuple(range(total)) if again else (),
    )
    return replace(job, plan=plan, schedule=add_recompute(table, range(stages)) if again else table)


def bits(precisions: Sequence[str], layers: int, folder: Path) -> None:
    """Print the state of every case, and whether those of one precision are one."""
    for precision in precisions:
        found: dict[str, str] = {}
        for ranks, schedule, again in CASES:
            begun_s = time.perf_counter()
            run = run_processes(
                cut_job(precision, ranks, schedule, again=again, layers=layers, output=folder)
            )
            loss = [report.loss for report in run.reports if isinstance(report, StepReport)][-1]
            name = f"{ranks} ranks, {schedule}{', recomputed' if again else ''}"
            found[name] = run.state_sha256
            taken_s = time.perf_counter() - begun_s
            print(
                f"  {precision}, {name}: {run.state_sha256[:12]}, loss {loss:.4f}, {taken_s:.0f} s",
                flush=True,
            )
        same = len(set(found.values())) == 1
        print(f"{precision}: {'the same bits' if same else 'OTHER BITS: MISSED'}", flush=True)


def on_paper(job: LaunchedJob) -> Profile:
    """The job's profile from the data sheet of this GPU."""
    config = job.config
    name = "h200" if "H200" in torch.cuda.get_device_name() else "h100"
    accelerator = ACCELERATORS[name]
    data = open_dataset(config.data, config.model, config.job.folder)
    definition = build_definition(config.model, data.vocabulary)
    device = DeviceProfile(
        kind="cuda", name=accelerator.name, memory_bytes=accelerator.memory_bytes, machine="1"
    )
    link = Link(latency_s=1e-5, bytes_per_s=50e9)
    return profile_on_paper(config, definition, data, accelerator, [device], link)


def passes_s(profile: Profile) -> dict[str, float]:
    """Seconds of one microbatch by kind of pass, all layers together."""
    layers = profile.model.layers
    return {
        "forward": sum(layer.forward_s for layer in layers),
        "input gradient": sum(layer.input_grad_s for layer in layers),
        "weight gradient": sum(layer.weight_grad_s for layer in layers),
        "update": sum(layer.update_s for layer in layers),
    }


def measured_passes(reports: Sequence[TimelineReport]) -> dict[ActionKind, float]:
    """Seconds of a microbatch by kind of action: the median over steps of their mean."""
    of_kind: dict[ActionKind, list[float]] = defaultdict(list)
    for report in reports:
        spans: dict[ActionKind, list[float]] = defaultdict(list)
        for span in report.spans:
            spans[Action.parse(span.action).kind].append(span.end_s - span.start_s)
        for kind, times in spans.items():
            of_kind[kind].append(sum(times) / len(times))
    return {kind: median(times) for kind, times in of_kind.items()}


def predicted(precisions: Sequence[str], layers: int, folder: Path) -> None:
    """Print predicted over measured step and memory of one rank, for each precision."""
    for precision in precisions:
        job = one_rank_job(8, folder, layers, 2048, precision, gpu=True)
        profiles = {"profile": profile_of(job)}
        if precision != "bfloat16-autocast":
            profiles["on paper"] = on_paper(job)
        run = run_processes(job)
        steps = [report.step_s for report in run.reports if isinstance(report, StepReport)][WARM_UP:]
        timelines = [report for report in run.reports if isinstance(report, TimelineReport)]
        peak = max(report.memory_bytes for report in timelines)
        told = ", ".join(
            f"{kind.name.lower()} {1e3 * s:.2f} ms"
            for kind, s in measured_passes(timelines[WARM_UP:]).items()
        )
        print(
            f"{precision}: a step {1e3 * median(steps):.1f} ms, peak {peak / 1e9:.2f} GB; {told}", flush=True
        )
        for name, profile in profiles.items():
            prediction = predict(profile, job.plan, job.schedule)
            of_kind = ", ".join(f"{kind} {1e3 * s:.2f} ms" for kind, s in passes_s(profile).items())
            print(
                f"  {name}: step {prediction.step_s / median(steps):.3f} of the measured, memory"
                f" {prediction.memory.peak_bytes[0] / peak:.3f}; {of_kind}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="bits,predicted")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing measured")
        return
    precisions = options.precisions.split(",")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    print(f"torch {torch.__version__}; {torch.cuda.get_device_name()}")
    with tempfile.TemporaryDirectory() as folder:
        if "bits" in options.parts.split(","):
            bits(precisions, options.layers, Path(folder))
        if "predicted" in options.parts.split(","):
            predicted(precisions, options.layers, Path(folder))


if __name__ == "__main__":
    main()
