"""Starts a backward pass at several outputs, each with its own gradient, and says what it left at a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class _Seed(torch.autograd.Function):
    """A scalar whose backward pass gives each of `outputs` its gradient."""

    @staticmethod
    def forward(ctx: Any, grads: tuple[Tensor, ...], *outputs: Tensor) -> Tensor:
        ctx.grads = grads
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *unused: Any) -> Any:
        return None, *ctx.grads


def backward(
    outputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    *,
    inputs: Sequence[Tensor] | None = None,
    retain_graph: bool = False,
) -> None:
    """`torch.autograd.backward(outputs, grads)`, to the bit.

    PyTorch checks the shapes of given gradients with code that imports SymPy: 0.6 s in the first step of
    every rank. A scalar needs no gradient and no check, and the engine checks shapes anyway.
    """
    seed = _Seed.apply(tuple(grads), *outputs)
    torch.autograd.backward((seed,), retain_graph=retain_graph, inputs=inputs)


def gradient_of(tensor: Tensor) -> Tensor:
    """The gradient that `tensor` has; zeros if no backward pass reached it."""
    return torch.zeros_like(tensor, dtype=tensor.grad_dtype) if tensor.grad is None else tensor.grad
