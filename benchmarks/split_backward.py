"""What splitting the backward pass costs: (I + W) / B of a transformer block, with gradients added in place.

    python -m benchmarks.split_backward [--rounds N] [--rows N]

B is stock autograd's full backward pass of the same block in the same run. It is compared with our B, and
with our I followed by our W. Each figure is the median of alternating rounds.
"""

from __future__ import annotations

import argparse
from statistics import median
from time import perf_counter

import torch

from workers.build import build_module
from workers.config import ModelConfig
from workers.deferred.queue import Workspace
from workers.layer import Layer
from workers.models.registry import build_definition


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--rows", type=int, default=1, help="samples of 128 tokens in a microbatch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = ModelConfig(family="gpt", layers=1, width=256, heads=4, context=128)
    definition = build_definition(model, 256)
    stock = build_module(definition, 1, 0)
    layer = Layer(
        1,
        "block0",
        build_module(definition, 1, 0),
        precision="float32",
        device=torch.device("cpu"),
        workspace=Workspace(),
    )
    x = torch.randn(options.rows, 128, 256, requires_grad=True)
    grad = torch.randn(options.rows, 128, 256)
    seconds: dict[str, list[float]] = {"stock B": [], "I": [], "W": [], "B": []}

    def timed(name: str, action: object) -> None:
        begun_s = perf_counter()
        action()  # type: ignore[operator]
        seconds[name].append(perf_counter() - begun_s)

    for _ in range(options.rounds):
        output = stock(x)
        timed("stock B", lambda output=output: torch.autograd.backward([output], [grad]))
        x.grad = None
        _, done = layer.forward((x,), 0, keep=True)
        timed("I", lambda done=done: layer.backward(done, (grad,), weights=False))
        timed("W", lambda done=done: layer.weight_grad(done))
        _, done = layer.forward((x,), 0, keep=True)
        timed("B", lambda done=done: layer.backward(done, (grad,), weights=True))
    for (name, p), (_, q) in zip(stock.named_parameters(), layer.module.named_parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        torch.testing.assert_close(2 * p.grad, q.grad, rtol=1e-3, atol=1e-3, msg=name)
    middle = {name: median(values[5:]) for name, values in seconds.items()}
    both = median(i + w for i, w in zip(seconds["I"][5:], seconds["W"][5:], strict=True))
    print(f"torch {torch.__version__}, one thread, {options.rows} x 128 tokens, width 256")
    for name, value in middle.items():
        print(f"{name:8} {value * 1e3:.3f} ms")
    print(f"(I + W) / stock B = {both / middle['stock B']:.3f}")
    print(f"(I + W) / B       = {both / middle['B']:.3f}")


if __name__ == "__main__":
    main()
