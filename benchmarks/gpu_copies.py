"""What snapshots cost a GPU that computes: the step while one is copied, and how much of the copying is hidden.

    python -m benchmarks.gpu_copies [--layers N] [--width N] [--rounds N] [--steps N]

Blocks of GPT of width 2048 in bfloat16 with AdamW, 8 x 1024 tokens: forward and backward passes of all of them, over
and over, with and without a thread that copies their states to the host (`workers/copies/snapshots.py`). Hidden is
the share of the time of copies to the host, by the profiler's trace, in which a kernel runs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.parts.targets import at_most
from workers.build import build_layers
from workers.config import ModelConfig, OptimizerConfig
from workers.copies.snapshots import Snapshots
from workers.layers.layer import Layer
from workers.models.registry import build_definition
from workers.reproducibility import determinism
from workers.state.layer_state import bytes_of
from workers.state.optim import make_optimizer

TARGET = 1.02
Span = tuple[float, float]


def step(layers: Sequence[Layer], x: Tensor, grad: Tensor) -> None:
    kept = []
    for layer in layers:
        (x,), done = layer.forward((x.detach().requires_grad_(),), 0, keep=True)
        kept.append(done)
    for layer, done in zip(reversed(layers), reversed(kept), strict=True):
        (grad,) = layer.backward(done, (grad,), weights=True)


def timed_step(layers: Sequence[Layer], x: Tensor, grad: Tensor) -> float:
    begun_s = time.perf_counter()
    step(layers, x, grad)
    torch.cuda.synchronize()
    return time.perf_counter() - begun_s


def hidden(trace: Path) -> tuple[float, float]:
    """Share of the time of copies to the host in which kernels run, and that time in seconds."""
    events: list[dict[str, Any]] = json.loads(trace.read_text())["traceEvents"]
    kernels = _merged(_spans(events, "kernel", ""))
    copies = _spans(events, "gpu_memcpy", "DtoH")
    total = sum(stop - begin for begin, stop in copies)
    both = sum(max(0.0, min(a, stop) - max(b, begin)) for begin, stop in copies for b, a in kernels)
    return both / total, total / 1e6


def _spans(events: Iterable[dict[str, Any]], category: str, name: str) -> list[Span]:
    return [
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == category and name in event["name"]
    ]


def _merged(spans: Iterable[Span]) -> list[Span]:
    found: list[Span] = []
    for begin, stop in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((begin, stop))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20, help="without copies, in each round")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing measured")
        return
    device = torch.device("cuda")
    determinism.fix(threads=1, cuda=True)
    model = ModelConfig(
        family="gpt",
        layers=options.layers,
        width=options.width,
        heads=options.width // 128,
        context=1024,
        vocabulary=256,
    )
    built = build_layers(
        build_definition(model, 256),
        list(range(1, options.layers + 1)),
        seed=0,
        precision="bfloat16",
        device=device,
        optimizer=make_optimizer(OptimizerConfig(), 1),
    )
    layers = [layer for layer, _ in built.values()]
    states = [state for _, state in built.values()]
    x = torch.randn(8, 1024, options.width, device=device, dtype=torch.bfloat16)
    grad = torch.randn_like(x)
    snapshots = Snapshots(lambda _step, _states: None, lambda _step: None)
    for _ in range(3):
        step(layers, x, grad)
    torch.cuda.synchronize()
    while_s: list[float] = []
    without_s: list[float] = []
    copied_s: list[float] = []
    for number in range(1, options.rounds + 1):
        begun_s = time.perf_counter()
        snapshots.capture(number, states, {})
        while snapshots.complete < number:
            while_s.append(timed_step(layers, x, grad))
        copied_s.append(time.perf_counter() - begun_s)
        snapshots.all_have(number)
        without_s += [timed_step(layers, x, grad) for _ in range(options.steps)]
    with tempfile.TemporaryDirectory() as folder:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            snapshots.capture(options.rounds + 1, states, {})
            while snapshots.complete <= options.rounds:
                step(layers, x, grad)
            torch.cuda.synchronize()
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        share, seconds = hidden(trace)
    size = sum(map(bytes_of, states))
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}: {size / 1e9:.2f} GB of states")
    ratio = median(while_s) / median(without_s)
    text = (
        f"a step while a snapshot is copied over one without: {ratio:.3f} ({1e3 * median(while_s):.1f} and"
        f" {1e3 * median(without_s):.1f} ms; {len(while_s)} and {len(without_s)} steps)"
    )
    print(at_most(text, ratio, TARGET))
    print(f"a snapshot is complete after {median(copied_s):.2f} s, {size / median(copied_s) / 1e9:.1f} GB/s")
    print(
        f"copies to the host take {seconds:.3f} s by the trace, {100 * share:.1f} % of it while a kernel runs"
    )


if __name__ == "__main__":
    main()
