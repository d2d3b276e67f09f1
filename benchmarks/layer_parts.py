"""Where the time of one layer and microbatch goes, beside stock autograd: products, other kernels, Python, update.

    python -m benchmarks.layer_parts [--microbatches N] [--layers N] [--width N]

Blocks of a GPT, context 128, microbatches of 4, one thread. Both sides are in one process and take each microbatch in
turn: ours as a stage does it, with an autograd graph per layer, and torch's as one graph of the same blocks. Medians of
the thread's processor time, divided by the number of blocks. The kernels' share is that of torch's profiler in a second
run; what no kernel took is Python and autograd's bookkeeping. The update comes after a pass over other memory, as in a
step.
"""

from __future__ import annotations

import argparse
import gc
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median
from time import thread_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from workers.build import build_layers, build_module
from workers.config import ModelConfig, OptimizerConfig
from workers.gradients.sink import GradientSink
from workers.layers.layer import Layer
from workers.models.registry import build_definition
from workers.process.host_memory import keep_freed_pages
from workers.reproducibility import determinism
from workers.state.optim import make_optimizer
from workers.step.stage import Stage

STEP = 8
"""Microbatches after which gradients are dropped."""
ACTIONS = ("forward", "I", "W", "B")
KERNELS = ("products", "attention", "other kernels")


class Ours:
    """Our blocks; `split`: the backward pass in two parts."""

    def __init__(self, layers: Sequence[Layer], *, split: bool) -> None:
        sink = GradientSink({layer.index: layer.summed for layer in layers})
        self.drop = sink.drop
        self._stage = Stage(layers, None, frozenset(), 0, sink)
        self._split = split

    def actions(self, number: int, x: Tensor, grad: Tensor) -> dict[str, Callable[[], Any]]:
        stage = self._stage
        found: dict[str, Callable[[], Any]] = {"forward": lambda: stage.forward(number, 0, (x,), None)}
        if not self._split:
            return found | {"B": lambda: stage.backward(number, (grad,), weights=True)}
        found["I"] = lambda: stage.backward(number, (grad,), weights=False)
        return found | {"W": lambda: stage.weight_grad(number)}


class Stock:
    """The same blocks in one graph."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def drop(self) -> None:
        for parameter in self._module.parameters():
            parameter.grad = None

    def actions(self, number: int, x: Tensor, grad: Tensor) -> dict[str, Callable[[], Any]]:
        made: list[Tensor] = []
        return {
            "forward": lambda: made.append(self._module(x)),
            "B": lambda: torch.autograd.backward(made, [grad]),
        }


Sides = dict[str, Ours | Stock]


def walls(sides: Sides, microbatches: int, batch: Callable[[], tuple[Tensor, Tensor]]) -> dict[Any, float]:
    """(Side, action) -> seconds."""
    taken: dict[Any, list[float]] = defaultdict(list)
    for number in range(microbatches):
        for name, side in _in_turn(sides, number):
            for action, run in side.actions(number, *batch()).items():
                begun_s = thread_time()
                run()
                taken[name, action].append(thread_time() - begun_s)
        if number % STEP == STEP - 1:
            for side in sides.values():
                side.drop()
    return {key: median(seconds[STEP:]) for key, seconds in taken.items()}


def kernels(sides: Sides, microbatches: int, batch: Callable[[], tuple[Tensor, Tensor]]) -> dict[Any, float]:
    """(Side, action, kind of kernel) -> seconds in those kernels by torch's profiler."""
    spent: dict[Any, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for number in range(microbatches):
            for name, side in _in_turn(sides, number):
                for action, run in side.actions(number, *batch()).items():
                    with record_function(f"part {name} {action} {number}"):
                        run()
    events = profiled.events()
    assert events is not None
    ranges = sorted(
        (event.time_range.start, event.time_range.end, event.name.split()[1:])
        for event in events
        if event.name.startswith("part ")
    )
    of = iter(ranges)
    _, end, (name, action, number) = next(of)
    for event in sorted(events, key=lambda event: event.time_range.start):
        if event.name.startswith("part ") or not event.name.startswith("aten::"):
            continue
        while event.time_range.start > end:
            _, end, (name, action, number) = next(of)
        spent[name, action, _kind(event.name)][int(number)] += event.self_cpu_time_total / 1e6
    return {key: median(of_number.values()) for key, of_number in spent.items()}


def _in_turn(sides: Sides, number: int) -> list[tuple[str, Ours | Stock]]:
    pairs = list(sides.items())
    first = number % len(pairs)
    return pairs[first:] + pairs[:first]


def _kind(operation: str) -> str:
    if operation in ("aten::mm", "aten::addmm", "aten::bmm"):
        return KERNELS[0]
    return KERNELS[1] if "attention" in operation else KERNELS[2]


def after_other_memory(run: Callable[[], Any]) -> float:
    """Median seconds of `run` when nothing that it reads is in a cache."""
    other, taken = torch.zeros(2**24), []
    for _ in range(40):
        other.add_(1.0)
        begun_s = thread_time()
        run()
        taken.append(thread_time() - begun_s)
    return median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--microbatches", type=int, default=160)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    options = parser.parse_args()
    determinism.fix(threads=1, cuda=False)
    keep_freed_pages()
    cpu, count = torch.device("cpu"), options.layers
    model = ModelConfig(family="gpt", layers=count, width=options.width, heads=4, context=128)
    definition = build_definition(model, 256)
    optimizer = make_optimizer(OptimizerConfig(), 100)

    def built() -> Any:
        return build_layers(
            definition, range(1, count + 1), seed=0, precision="float32", device=cpu, optimizer=optimizer
        )

    own, apart = built(), built()
    stock = nn.Sequential(*(build_module(definition, layer, 0).train() for layer in range(1, count + 1)))
    sides: Sides = {
        "ours": Ours([layer for layer, _ in own.values()], split=False),
        "split": Ours([layer for layer, _ in apart.values()], split=True),
        "stock": Stock(stock),
    }

    def batch() -> tuple[Tensor, Tensor]:
        x, grad = (torch.randn(4, 128, options.width) for _ in range(2))
        return x.requires_grad_(), grad

    gc.freeze()
    taken = walls(sides, options.microbatches, batch)
    in_kernels = kernels(sides, STEP * 2, batch)
    print(f"torch {torch.__version__}, one thread; us per block and microbatch")
    for (name, action), seconds in sorted(taken.items(), key=lambda pair: ACTIONS.index(pair[0][1])):
        parts = {kind: in_kernels.get((name, action, kind), 0.0) for kind in KERNELS}
        parts["Python and autograd"] = seconds - sum(parts.values())
        text = ", ".join(f"{kind} {1e6 * part / count:.0f}" for kind, part in parts.items())
        print(f"{action:8} {name:6} {1e6 * seconds / count:6.0f}: {text}")
    for name, (f, b) in {"ours": ("forward", "B"), "split": ("forward", "I")}.items():
        whole = taken[name, f] + taken[name, b] + taken.get((name, "W"), 0.0)
        print(
            f"{name}: {(taken['stock', 'forward'] + taken['stock', 'B']) / whole:.3f} of stock's throughput"
        )
    gradients = {index: layer.gradients() for index, (layer, _) in own.items()}
    after = torch.optim.AdamW(stock.parameters(), weight_decay=0.1)

    def norms() -> list[float]:
        each = [g for of_layer in gradients.values() for g in of_layer.values()]
        return torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in each]).tolist()

    def update() -> None:
        for index, (_, state) in own.items():
            optimizer.update_(state, gradients[index], 0.125, optimizer.lr(0))

    for text, run in (("norms", norms), ("update", update), ("torch.optim.AdamW", after.step)):
        print(f"{text}: {1e6 * after_other_memory(run) / count:.0f} us per block and step")


if __name__ == "__main__":
    main()
