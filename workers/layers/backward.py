"""Starts a backward pass at several outputs, each with its own gradient; says what it left at a tensor, and what a
graph ends in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, _engine_run_backward


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


@dataclass(frozen=True)
class Ends:
    """The findings at the nodes of a graph."""

    leaves: tuple[Tensor, ...]
    """The tensors at which its backward pass leaves gradients."""
    custom: bool
    """Whether it has nodes whose backward pass is written in Python."""
    checkpoint: bool
    """Whether it has a reentrant checkpoint, behind which there is no graph yet."""


def ends_of(outputs: Iterable[Tensor]) -> Ends:
    """The ends of the graph behind `outputs`."""
    leaves = {id(t): t for t in outputs if t.requires_grad and t.grad_fn is None}
    stack: list[Node] = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen: set[Node] = set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves[id(variable)] = variable
        stack.extend(following for following, _ in node.next_functions if following is not None)
    custom = [node for node in seen if isinstance(node, BackwardCFunction)]
    checkpoint = any(node.name() == "CheckpointFunctionBackward" for node in custom)
    return Ends(tuple(leaves.values()), bool(custom), checkpoint)


def gradient_of(tensor: Tensor) -> Tensor:
    """The gradient that `tensor` has; zeros if no backward pass reached it."""
    return torch.zeros_like(tensor, dtype=tensor.grad_dtype) if tensor.grad is None else tensor.grad
