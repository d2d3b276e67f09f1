"""A backward pass from several outputs: the bits of PyTorch's own, without the modules that one imports. No other part
of a step imports them either."""

from __future__ import annotations

import subprocess
import sys

import torch

from workers.layers.backward import backward

FIRST_STEP = """
import sys
import torch
from workers.layers.backward import backward
from workers.data.read_ahead import timed
samples = torch.arange(3.0)
assert timed(lambda: samples[[1]], torch.device("cpu"), watch=True)[0].tolist() == [1]
x = torch.ones(3, requires_grad=True)
backward([x * 2], [torch.ones(3)])
assert x.grad.tolist() == [2, 2, 2]
print("sympy" in sys.modules)
"""


def test_gradients_are_those_of_pytorch_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, other = (torch.randn(4, 4, generator=generator) for _ in range(2))
    grads = [torch.randn(4, 4, generator=generator), torch.randn((), generator=generator)]
    results: list[list[torch.Tensor | None]] = []
    for run in (torch.autograd.backward, backward):
        leaves = [weight.clone().requires_grad_(), other.clone().requires_grad_()]
        product = leaves[0] @ leaves[1]
        outputs = [torch.tanh(product), product.sum()]
        run(outputs, grads, inputs=leaves[:1], retain_graph=True)
        run(outputs, grads)
        results.append([leaf.grad for leaf in leaves])
    for theirs, ours in zip(*results, strict=True):
        assert theirs is not None
        assert ours is not None
        assert torch.equal(theirs, ours)


def test_a_first_step_imports_no_sympy() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_STEP], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
