"""Defers a matrix's gradient: from the gradient of a module's output to an entry in the queue.

Stock autograd computes the output from a detached parameter; these functions receive its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from workers.layers.deferred.queue import Accumulator, ParameterUse, WeightGradQueue

UseOf = Callable[..., ParameterUse]
"""Gradient of each output (None where it has none) -> the use of the matrix behind them."""


def compute_dtype(tensor: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype in which the product of `tensor` and `weight` is computed: autocast's, or theirs.

    Raises:
        RuntimeError: without autocast they have two, which torch does not multiply either.
    """
    device = tensor.device.type
    if not tensor.is_meta and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    if tensor.dtype != weight.dtype:
        its, others = (str(t.dtype).removeprefix("torch.") for t in (tensor, weight))
        raise RuntimeError(
            f"an input of {its} meets a matrix of {others}: with job.precision, parameters and what a layer takes have"
            " its bits; cast what you make or keep yourself where it is used, as in self.mean.to(x.dtype)"
        )
    return tensor.dtype


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`functional.linear` with the bits that it has where `weight` requires a gradient, though this one is detached.

    There torch makes one matrix of any stack of matrices; with a detached weight it looks at the stack's strides
    first, may multiply each matrix by itself, and so get other last bits.

    Args:
        x: [..., K] of the same dtype as weight [N, K].
    """
    if x.dim() < 3 or (bias is not None and x.is_contiguous()):
        return functional.linear(x, weight, bias)
    rows = torch.mm(x.reshape(-1, x.shape[-1]), weight.t())
    output = rows.view(*x.shape[:-1], weight.shape[0])
    return output if bias is None else output + bias.to(output.dtype)


def adds_wide(factor: Tensor, total: torch.dtype) -> bool:
    """Whether products of `factor` can be added in `total` where they are formed: those of 16 bits on a GPU."""
    return factor.is_cuda and factor.element_size() == 2 and total == torch.float32


def add_product_(total: Tensor, one: Tensor, other: Tensor) -> None:
    """total += one @ other, of 16 bits, in the 32 of `total`: nothing is rounded on the way, and nothing kept."""
    torch.addmm(total, one, other, out_dtype=total.dtype, out=total)


def defer(output: Tensor, accumulator: Accumulator, queue: WeightGradQueue, use_of: UseOf) -> Tensor:
    """`output`, made from a detached parameter, such that its gradient puts a use of the parameter into `queue`.

    The input gradient stays stock autograd's business. Python between two matrix products is expensive, because the
    product has displaced the interpreter from the cache; so there is as little of it as possible.
    """
    if not (torch.is_grad_enabled() and accumulator.parameter.requires_grad):
        return output
    queue.used(accumulator)
    if queue.anchored or not output.requires_grad:
        return _Anchor.apply(accumulator, accumulator.parameter, queue, use_of, output)  # type: ignore[return-value]

    def hook(grads: tuple[Tensor | None, ...]) -> None:
        queue.reached(accumulator, use_of, grads[0])

    # On the node rather than on the tensor: so it sees the gradient after all hooks of the tensor, and still sees it
    # if the tensor is changed in place. A view gets another node then, so the hook goes to the product behind it.
    node = output.grad_fn
    assert node is not None
    if output._is_view():
        node = node.next_functions[0][0]
        assert node is not None
    node.register_prehook(hook)
    return output


def defer_together(
    outputs: tuple[Tensor, ...], accumulator: Accumulator, queue: WeightGradQueue, use_of: UseOf
) -> tuple[Tensor, ...]:
    """Variant of `defer` for outputs that come from parts of one parameter: together they are one use of it."""
    if not (torch.is_grad_enabled() and accumulator.parameter.requires_grad):
        return outputs
    queue.used(accumulator)
    return _Meeting.apply(accumulator, accumulator.parameter, queue, use_of, *outputs)  # type: ignore[return-value]


class _Anchor(Function):
    """A node that hangs on a parameter, and which begins a graph where nothing else does. The output stays one that may
    be changed in place."""

    @staticmethod
    def forward(
        ctx: Any,
        accumulator: Accumulator,
        parameter: Tensor,
        queue: WeightGradQueue,
        use_of: UseOf,
        output: Tensor,
    ) -> Tensor:
        ctx.accumulator, ctx.queue, ctx.use_of = accumulator, queue, use_of
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> Any:  # type: ignore[override]
        ctx.queue.reached(ctx.accumulator, ctx.use_of, grad)
        return None, None, None, None, grad


class _Meeting(Function):
    """A node at which the gradients of several outputs meet, and which begins a graph where nothing else does."""

    @staticmethod
    def forward(
        ctx: Any,
        accumulator: Accumulator,
        parameter: Tensor,
        queue: WeightGradQueue,
        use_of: UseOf,
        *outputs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.accumulator, ctx.queue, ctx.use_of = accumulator, queue, use_of
        ctx.set_materialize_grads(False)
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # type: ignore[override]
        ctx.queue.reached(ctx.accumulator, ctx.use_of, *grads)
        return None, None, None, None, *grads


class Held:
    """A matrix's input, held outside autograd's own saved tensors and so without their checks and early release."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor
        self._version = tensor._version

    def pop(self) -> Tensor:
        """The input, once: memory that is freed early is used again while it is in the cache."""
        tensor, self._tensor = self._tensor, None
        if tensor is None:
            raise RuntimeError(
                "a backward pass goes through one product of a matrix twice, as torch.autograd.grad does in a hook,"
                " which the layer's first pass did not show: have it take such gradients from its first pass on"
            )
        if tensor._version != self._version:
            raise RuntimeError(
                "the input of a matrix was changed in place after its use; its gradient is gone"
            )
        return tensor
