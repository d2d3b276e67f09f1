"""What splitting the backward pass costs: (I + W) / B of a transformer block, with gradients added in place.

    python -m benchmarks.split_backward [--rounds N] [--rows N]
    python -m benchmarks.split_backward --gpu --rows 8 [--precision bfloat16] [--width N]

B is stock autograd's full backward pass of the same block in the same run. It is compared with our B, and
with our I followed by our W, and with our B of a pass whose parameters are all frozen, or half of its matrices. Each
figure is the median of alternating rounds. `--gpu`: samples of 1024 tokens, by the GPU's clock.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from benchmarks.parts.marks import Marks
from workers.build import build_layers, build_module
from workers.config import ModelConfig, OptimizerConfig
from workers.models.registry import build_definition
from workers.reproducibility import determinism
from workers.state.optim import make_optimizer
from workers.state.precision import boundary_dtype


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--rows", type=int, default=1, help="samples of 128 tokens in a microbatch")
    parser.add_argument("--width", type=int, help="256 on a CPU, 2048 on a GPU")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--gpu", action="store_true", help="on this machine's first GPU")
    options = parser.parse_args()
    device = torch.device("cuda" if options.gpu else "cpu")
    determinism.fix(threads=1, cuda=options.gpu)
    context, heads = (1024, 16) if options.gpu else (128, 4)
    width = options.width or (2048 if options.gpu else 256)
    model = ModelConfig(family="gpt", layers=1, width=width, heads=heads, context=context)
    definition = build_definition(model, 256)
    stock = build_module(definition, 1, 0).to(device)
    layer, _ = build_layers(
        definition,
        [1],
        seed=0,
        precision=options.precision,
        device=device,
        optimizer=make_optimizer(OptimizerConfig(), 1),
    )[1]
    dtype = boundary_dtype(options.precision) or torch.float32
    stock.to(dtype)
    x = torch.randn(options.rows, context, width, device=device, dtype=dtype).requires_grad_()
    grad = torch.randn(options.rows, context, width, device=device, dtype=dtype)
    names = {name for name, _ in layer.module.named_parameters()}
    matrices = sorted(name for name, p in layer.module.named_parameters() if p.dim() == 2)
    frozen = {"B, all frozen": frozenset(names), "B, every other matrix frozen": frozenset(matrices[::2])}
    seconds: dict[str, list[float]] = {each: [] for each in ("forward", "stock B", "I", "W", "B", *frozen)}
    marks = Marks(device)

    def timed(name: str, action: Callable[[], Any]) -> Any:
        begun = marks.mark()
        result = action()
        seconds[name].append(marks.between_s(begun, marks.mark()))
        return result

    for _ in range(options.rounds):
        output = stock(x)
        timed("stock B", lambda output=output: torch.autograd.backward([output], [grad]))
        x.grad = None
        _, done = layer.forward((x,), 0, keep=True)
        timed("I", lambda done=done: layer.backward(done, (grad,), weights=False))
        timed("W", lambda done=done: layer.weight_grad(done))
        _, done = timed("forward", lambda: layer.forward((x,), 0, keep=True))
        timed("B", lambda done=done: layer.backward(done, (grad,), weights=True))
    summed = {name: gradient.clone() for name, gradient in layer.gradients().items()}
    for _ in range(options.rounds):
        for name, those in frozen.items():
            _, done = layer.forward((x,), 0, keep=True, frozen=those)
            timed(name, lambda done=done: layer.backward(done, (grad,), weights=True))
    if options.precision == "float32":
        for name, p in stock.named_parameters():
            assert p.grad is not None
            torch.testing.assert_close(2 * p.grad, summed[name], rtol=1e-3, atol=1e-3, msg=name)
    middle = {name: median(values[5:]) for name, values in seconds.items()}
    both = median(i + w for i, w in zip(seconds["I"][5:], seconds["W"][5:], strict=True))
    where = torch.cuda.get_device_name() if options.gpu else "one thread"
    print(
        f"torch {torch.__version__}, {where}, {options.precision}, {options.rows} x {context} tokens, width {width}"
    )
    for name, value in middle.items():
        print(f"{name:28} {value * 1e3:.3f} ms, {value / middle['B']:.3f} of B")
    print(f"(I + W) / stock B = {both / middle['stock B']:.3f}")
    print(f"(I + W) / B       = {both / middle['B']:.3f}")


if __name__ == "__main__":
    main()
