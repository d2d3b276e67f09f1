"""Starts a backward pass at several outputs, each with its own gradient, and says what it left at a tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward


def backward(
    outputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    *,
    inputs: Sequence[Tensor] | None = None,
    retain_graph: bool = False,
) -> None:
    """`torch.autograd.backward(outputs, grads)`, to the bit.

    What that does before it calls autograd's engine is left out: PyTorch checks the shapes of given gradients with code
    that imports SymPy, 0.6 s in the first step of every rank, and the engine checks them anyway.
    """
    _engine_run_backward(
        tuple(outputs),
        tuple(grads),
        retain_graph,
        False,  # no graph of the gradients
        () if inputs is None else tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def gradient_of(tensor: Tensor) -> Tensor:
    """The gradient that `tensor` has; zeros if no backward pass reached it."""
    return torch.zeros_like(tensor, dtype=tensor.grad_dtype) if tensor.grad is None else tensor.grad
