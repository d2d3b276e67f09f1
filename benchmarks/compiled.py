"""Compiled layers beside those that are not: the step of two CPU ranks, one block's passes, and what the time goes to.

    python -m benchmarks.compiled [--precisions LIST] [--schedule FAMILY] [--rounds N] [--steps N] [--layers N]

LLaMA of width 256, context 128, 8 microbatches of 4, on two ranks of one thread each. A round runs the job both
ways, one after the other; its figures are the medians of its steps after the first two, and the ratio is the median
over rounds. Then F, I and W of one block in one process, both ways in turn, and the share of matrix products and
attention in their time by torch's profiler: what a compiler of what is between them cannot change. `--rounds 0`: the
block alone.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.parts.targets import at_least
from benchmarks.parts.two_rank_job import make_job, taken
from workers.build import build_layers
from workers.config import ModelConfig, OptimizerConfig
from workers.layers.compiler import Compiler
from workers.layers.layer import Layer
from workers.models.registry import build_definition
from workers.reproducibility import determinism
from workers.state.optim import make_optimizer
from workers.state.precision import boundary_dtype

ASKED = 1.1
"""Of the throughput with compiled layers over that without."""
WIDTH, HEADS, CONTEXT, ROWS, VOCABULARY = 256, 4, 128, 4, 256
PARTS = ("F", "I", "W")
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_dot_product")
"""What the names of matrix products and attention begin with; theirs is the time of what they call, too."""
BLOCK_ROUNDS = 60


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--precisions", default="float32,bfloat16")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; torch {torch.__version__};"
        f" {date.today()}"
    )
    determinism.fix(threads=1, cuda=False)
    for precision in options.precisions.split(","):
        if options.rounds:
            steps(precision, options)
        block(precision)


def steps(precision: str, options: argparse.Namespace) -> None:
    """Print a step's time both ways, and the ratio."""
    model = ModelConfig(
        family="llama", layers=options.layers, width=WIDTH, heads=HEADS, context=CONTEXT, vocabulary=None
    )
    ratios: list[float] = []
    for number in range(options.rounds):
        step_s: dict[bool, float] = {}
        for compiled in (False, True) if number % 2 == 0 else (True, False):
            with tempfile.TemporaryDirectory() as folder:
                job = make_job(
                    options.schedule,
                    options.steps,
                    Path(folder),
                    model=model,
                    precision=precision,
                    compile=compiled,
                )
                step_s[compiled] = median(taken(job).values())
        ratios.append(step_s[False] / step_s[True])
        print(f"  {1e3 * step_s[False]:.0f} ms, compiled {1e3 * step_s[True]:.0f} ms", flush=True)
    said = f"{precision}, {options.schedule}: a step over a compiled one: {median(ratios):.3f}"
    print(at_least(f"{said} ({min(ratios):.3f} to {max(ratios):.3f})", median(ratios), ASKED), flush=True)


def block(precision: str) -> None:
    """Print the passes of one block both ways, and what their time goes to."""
    definition = build_definition(
        ModelConfig(family="llama", layers=1, width=WIDTH, heads=HEADS, context=CONTEXT), VOCABULARY
    )
    plain, compiled = (
        build_layers(
            definition,
            [1],
            seed=0,
            precision=precision,
            device=torch.device("cpu"),
            optimizer=make_optimizer(OptimizerConfig(), 1),
        )[1][0]
        for _ in range(2)
    )
    tokens = torch.zeros(ROWS, CONTEXT, dtype=torch.long)
    compiler = Compiler(
        definition, lambda: (tokens,), precision=precision, device=torch.device("cpu"), threads=1
    )
    begun_s = perf_counter()
    compiler.compile([compiled])
    compiler.close()
    assert compiled.compiled is not None, compiler.why_not
    print(f"{precision}: embedding, block and head compiled in {perf_counter() - begun_s:.1f} s")
    dtype = boundary_dtype(precision) or torch.float32
    x, grad = (torch.randn(ROWS, CONTEXT, WIDTH, dtype=dtype) for _ in range(2))
    x.requires_grad_()
    times: dict[str, dict[str, list[float]]] = {"plain": {}, "compiled": {}}
    for number in range(BLOCK_ROUNDS):
        for name, layer in (("plain", plain), ("compiled", compiled)):
            found = passes(layer, x, grad)
            if number >= BLOCK_ROUNDS // 6:
                for part, spent_s in zip(PARTS, found, strict=True):
                    times[name].setdefault(part, []).append(spent_s)
    before, after = ({p: median(of[p]) for p in PARTS} for of in (times["plain"], times["compiled"]))
    for part in PARTS:
        ratio = before[part] / after[part]
        print(
            f"  {part}: {1e3 * before[part]:.2f} ms, compiled {1e3 * after[part]:.2f} ms, {ratio:.3f} times"
        )
    ratio = sum(before.values()) / sum(after.values())
    print(f"  F + I + W: {ratio:.3f} times")
    shares = [share_of_products(lambda layer=layer: passes(layer, x, grad)) for layer in (plain, compiled)]
    print(
        f"  matrix products and attention: {shares[0]:.1%} of the time, {shares[1]:.1%} when compiled; so at most"
        f" {1 / shares[0]:.2f} times if nothing else took any"
    )


def passes(layer: Layer, x: Tensor, grad: Tensor) -> tuple[float, float, float]:
    """Seconds of one microbatch's forward pass, input gradient and weight gradient."""
    begun_s = perf_counter()
    _, done = layer.forward((x,), 1, keep=True)
    forward_s = perf_counter()
    layer.backward(done, (grad,), weights=False)
    input_s = perf_counter()
    layer.weight_grad(done)
    return forward_s - begun_s, input_s - forward_s, perf_counter() - input_s


def share_of_products(run: Callable[[], object], repeats: int = 20) -> float:
    """The share of matrix products and attention in the time of `run`."""
    run()
    begun_s = perf_counter()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(repeats):
            run()
    spent_us = 1e6 * (perf_counter() - begun_s)
    events = [event for event in profiler.events() or () if event.name.startswith(_PRODUCTS)]
    # Not those inside others: attention is one operation that calls another.
    outer = [e for e in events if e.cpu_parent is None or not e.cpu_parent.name.startswith(_PRODUCTS)]
    return sum(event.cpu_time_total for event in outer) / spent_us


if __name__ == "__main__":
    main()
