"""How much faster a job trains whose layers freeze: alone, with pipelines that shrink and multiply, with kept outputs.

    python -m benchmarks.packed_pipelines [--blocks 12,24] [--alphas 0.333,0.4,0.5] [--epochs N] [--epoch-steps N]

Eight emulated ranks train 32 microbatches a step of a model of equal blocks, F = I = W; after each epoch the bound of
PipeTransformer's eq. 1 is frozen (its rule without the gradients). The model's states and activations need all eight
ranks at first; frozen layers give up activations and gradients. `pipeline` is one of 32 microbatches, where freed ranks
have nothing to do; `replicas` is 4 of 8 microbatches, of which ranks that are freed run more at a time. `kept` is with
`freeze.cache`: reading is real, and computing modelled. Each is compared with the same job, and with `pipeline` that
freezes nothing. All jobs of the same replicas end with the bits of the one that keeps its layout.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.parts.process_jobs import ElasticJob, Ran, made_profile
from benchmarks.parts.settled_job import settled
from orchestrator.events import types as events
from orchestrator.lifecycle.states import JobFinished
from orchestrator.prepare.settling import Settled
from orchestrator.spec.job_spec import ClusterConfig, JobConfig, PipelineConfig, Spec
from planner.profile import Profile
from workers.config import DataConfig, ElasticConfig, EmulatedConfig, FreezeConfig, ModelConfig
from workers.protocol.reports import ActivationsUsed, StepReport

RANKS, MICROBATCHES = 8, 32
SMALL = 0.05
"""Time of the first and the last layer, in those of a block."""
WAYS = (
    ("frozen only", False, "off"),
    ("kept", False, "auto"),
    ("packed", True, "off"),
    ("packed, kept", True, "auto"),
)
"""What is done beside freezing: name, whether layouts follow, `freeze.cache`."""
STATE, ACTIVATIONS = 16 * 10**6, 8 * 10**6
"""Bytes of a block: weights, moments and gradients; activations of a microbatch."""


def bounds(blocks: int, alpha: float, epochs: int) -> list[int]:
    """The layers that are frozen from each epoch's end on, by eq. 1's bound; the first layer with its neighbour."""
    found, bound = [], 0.0
    for _ in range(epochs - 1):
        bound = min(bound + alpha * (blocks - bound), blocks - 1)
        found.append(1 + int(bound) if int(bound) else 0)
    return found


def job(
    folder: Path,
    name: str,
    blocks: int,
    frozen: Sequence[int],
    given: argparse.Namespace,
    *,
    cache: str = "off",
    **pipeline: Any,
) -> Settled:
    pass_s = given.pass_ms / 1e3 * 12 / blocks
    text = folder / "text.txt"
    # An epoch's samples of 8 characters, and a tenth to be held out.
    lines = "".join(f"{number} sheep jump over {number + 1} fences\n" for number in range(2000))
    text.write_text(lines[: int(MICROBATCHES * given.epoch_steps * 8 / 0.9) + 8])
    times = (SMALL * pass_s, *[pass_s] * blocks, SMALL * pass_s)
    schedule = [(epoch * given.epoch_steps + 1, layers) for epoch, layers in enumerate(frozen, 1) if layers]
    freeze: dict[str, Any] = {"method": "prefix", "schedule": schedule, "cache": cache} if schedule else {}
    spec = Spec(
        job=JobConfig(
            name=name, output=str(folder / name), steps=given.epochs * given.epoch_steps, sample_tokens=0
        ),
        model=ModelConfig(family="gpt", layers=blocks, width=8, heads=1, context=8),
        data=DataConfig(source="text", path=str(text)),
        pipeline=PipelineConfig(ranks=RANKS, microbatch_size=1, pipelines=1, **pipeline),
        freeze=FreezeConfig.model_validate(freeze),
        cluster=ClusterConfig(
            device="emulated",
            emulated=EmulatedConfig(forward_s=times, input_grad_s=times, weight_grad_s=times),
        ),
        elastic=ElasticConfig(redundancy="checkpoint"),
    )
    return settled(spec)


def profile(done: Settled, given: argparse.Namespace) -> Profile:
    """The emulated times, and sizes of which eight ranks have just enough memory."""
    layers = len(done.outline.layers)
    factor = given.pass_ms / 10 * 12 / (layers - 2)
    weights = [SMALL * factor, *[factor] * (layers - 2), SMALL * factor]
    scale = 12 / (layers - 2)
    parameters = [1000, *[int(STATE * scale / 16)] * (layers - 2), 1000]
    # In 1F1B the first of eight ranks holds the activations of as many layers as the model has.
    memory = int(1.06 * (12 / RANKS * STATE + 12 * ACTIVATIONS))
    made = made_profile(done.outline.layers, parameters, RANKS, weights=weights, memory_bytes=memory)
    blocks = tuple(
        replace(layer, activation_bytes=int(ACTIVATIONS * scale)) if layer.parameters > 1000 else layer
        for layer in made.model.layers
    )
    return replace(made, model=replace(made.model, layers=blocks))


def run(done: Settled, given: argparse.Namespace, *, packs: bool) -> Ran:
    ran = ElasticJob(done, profile=profile(done, given), packs=packs).run(limit_s=900.0)
    assert isinstance(ran.state, JobFinished), ran.state
    return ran


def train_s(ran: Ran) -> float:
    """From the first commit to the last."""
    committed_s = [report.committed_s for report in ran.of(StepReport)]
    return committed_s[-1] - committed_s[0]


def told(name: str, ran: Ran, same_s: float, plain_s: float) -> str:
    layouts = [f"{each.plan.pipeline_count} x {each.plan.pipeline_ranks}" for each in ran.of(events.Issued)]
    kept = [layout for number, layout in enumerate(layouts) if not number or layout != layouts[number - 1]]
    pauses = [
        event.detect_s + event.settle_s + event.plan_s + event.move_s + event.resume_s
        for event in ran.of(events.Regrouped)
    ]
    steps_s = [report.step_s for report in ran.of(StepReport)]
    used = ran.of(ActivationsUsed)
    found = sum(each.hits for each in used)
    passed = found + sum(each.partly + each.misses for each in used)
    found_of = f", {found / passed:.0%} found" if passed else ""
    pause = f", pauses {1e3 * median(pauses):.0f} (most {1e3 * max(pauses):.0f}) ms" if pauses else ""
    return (
        f"{name:<34} {train_s(ran):6.1f} s  {same_s / train_s(ran):5.2f} of the same job, {plain_s / train_s(ran):5.2f}"
        f" of one pipeline; steps {1e3 * steps_s[1]:.0f} -> {1e3 * median(steps_s[-5:]):.0f} ms;"
        f" {', '.join(kept)}{pause}{found_of}; bits {str(ran.state_sha256)[:8]}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", default="12,24")
    parser.add_argument("--alphas", default="0.33333333,0.4,0.5")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--epoch-steps", type=int, default=6)
    parser.add_argument("--pass-ms", type=float, default=4.0, help="of a block of 12, and a microbatch")
    given = parser.parse_args(arguments)
    print(
        f"{RANKS} emulated ranks, {MICROBATCHES} microbatches, {given.epochs} epochs of {given.epoch_steps} steps,"
        f" {given.pass_ms:g} ms a pass; {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f};"
        f" torch {torch.__version__}; {date.today()}"
    )
    shapes: dict[str, dict[str, Any]] = {
        "pipeline": {"replicas": 1, "microbatches": MICROBATCHES},
        "replicas": {"replicas": 4, "microbatches": MICROBATCHES // 4},
    }
    with tempfile.TemporaryDirectory() as name:
        folder, number = Path(name), 0
        for blocks in map(int, given.blocks.split(",")):
            plain: dict[str, float] = {}
            for shape, pipeline in shapes.items():
                ran = run(
                    job(folder, f"none-{blocks}-{shape}", blocks, (), given, **pipeline), given, packs=False
                )
                plain[shape] = train_s(ran)
                line = told(f"{blocks} blocks, {shape}, none", ran, plain[shape], plain["pipeline"])
                print(line, flush=True)
            for alpha in map(float, given.alphas.split(",")):
                frozen = bounds(blocks, alpha, given.epochs)
                print(f"alpha {alpha:.2f}: frozen after each epoch {frozen}", flush=True)
                for shape, pipeline in shapes.items():
                    for way, packs, cache in WAYS:
                        number += 1
                        done = job(folder, f"job-{number}", blocks, frozen, given, cache=cache, **pipeline)
                        ran = run(done, given, packs=packs)
                        what = f"{blocks} blocks, {shape}, {way}"
                        print(told(what, ran, plain[shape], plain["pipeline"]), flush=True)


if __name__ == "__main__":
    main()
