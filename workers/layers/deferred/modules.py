"""Forward passes of Linear, Embedding, Conv and transformers' Conv1D modules with their weight gradients deferred."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from workers.layers.deferred import traced
from workers.layers.deferred.defer import Held, UseOf, add_product_, adds_wide, compute_dtype, defer, product
from workers.layers.deferred.intact import Intact
from workers.layers.deferred.queue import Accumulator, Deferral, ParameterUse, WeightGradQueue
from workers.state.flat import grad_dtype


def linear_use(accumulator: Accumulator, x: Tensor, *, transposed: bool = False) -> UseOf:
    """Function from the gradient of the product of `x` and a matrix to a use of the matrix, in the dtype of `x`.

    Args:
        transposed: whether the matrix lies as [K, N], not as [N, K].
    """
    held = Held(x)
    dtype, wide = x.dtype, adds_wide(x, grad_dtype(accumulator.parameter))

    def use_of(grad: Tensor) -> ParameterUse:
        x = held.pop()
        x_rows, rows = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        one, other = (x_rows.t(), rows) if transposed else (rows.t(), x_rows)

        def form(out: Tensor | None) -> Tensor:
            return torch.mm(one, other, out=out) if out is not None else torch.mm(one, other)

        def add(total: Tensor) -> None:
            add_product_(total, one, other)

        return ParameterUse(accumulator, form, dtype, add if wide else None)

    return use_of


def embedding_use(accumulator: Accumulator, tokens: Tensor, padding_idx: int | None) -> UseOf:
    """Variant of `linear_use` for rows of the matrix."""
    parameter, dtype = accumulator.parameter, grad_dtype(accumulator.parameter)

    def use_of(grad: Tensor) -> ParameterUse:
        def form(out: Tensor | None) -> Tensor:
            # Added row by row, which 16 bits would not bear: a frequent token has hundreds of rows.
            dense = torch.ops.aten.embedding_dense_backward(
                grad.to(dtype), tokens, parameter.shape[0], -1 if padding_idx is None else padding_idx, False
            )
            return dense if out is None else out.copy_(dense)

        return ParameterUse(accumulator, form, dtype)

    return use_of


def convolution_use(
    accumulator: Accumulator, x: Tensor, geometry: Sequence[Any], with_bias: FormedWithBias | None = None
) -> UseOf:
    """Variant of `linear_use` for a convolution.

    Args:
        geometry: as `torch.convolution` takes it.
        with_bias: forms the gradient with the bias's, before.
    """
    held, dtype = Held(x), x.dtype
    weight = accumulator.cast(dtype)

    def use_of(grad: Tensor) -> ParameterUse:
        x, formed = held.pop(), None if with_bias is None else with_bias.take()

        def form(out: Tensor | None) -> Tensor:
            found = _convolution_backward(grad, x, weight, geometry, weight=True)[0]
            return found if out is None else out.copy_(found)

        if formed is None:
            return ParameterUse(accumulator, form, dtype)
        return ParameterUse(accumulator, lambda out: formed if out is None else out.copy_(formed), dtype)

    return use_of


class FormedWithBias:
    """The gradients of a convolution's matrix and bias: on CPUs one kernel forms both, whichever is asked for."""

    def __init__(
        self, x: Tensor, weight: Tensor, geometry: Sequence[Any], wanted: bool, queue: WeightGradQueue
    ) -> None:
        self.queue = queue
        self._held, self._weight, self._geometry, self._wanted = Held(x), weight, geometry, wanted
        self._formed: Tensor | None = None

    def bias(self, grad: Tensor) -> Tensor:
        """Gradient of the bias; keeps the matrix's if it is wanted."""
        self._formed, bias = _convolution_backward(
            grad, self._held.pop(), self._weight, self._geometry, weight=self._wanted, bias=True
        )
        return bias

    def take(self) -> Tensor | None:
        """Gradient of the matrix, once; None: it has not been formed."""
        formed, self._formed = self._formed, None
        return formed


class _Bias(Function):
    """The output of a convolution with its bias, which is detached there. It may be changed in place."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, bias: Tensor, formed: FormedWithBias) -> Tensor:
        ctx.formed = formed
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> Any:  # type: ignore[override]
        formed: FormedWithBias = ctx.formed
        # A further walk goes to other parameters: this one's is there already.
        if grad is None or formed.queue.closed or not ctx.needs_input_grad[1]:
            return grad, None, None
        return grad, formed.bias(grad), None


def _convolution_backward(
    grad: Tensor, x: Tensor, matrix: Tensor, geometry: Sequence[Any], *, weight: bool, bias: bool = False
) -> tuple[Tensor, Tensor]:
    """The gradients of a convolution's matrix and bias."""
    mask = [False, weight, bias]
    return torch.ops.aten.convolution_backward(grad, x, matrix, [matrix.shape[0]], *geometry, mask)[1:]


def product_forward(weight: Tensor, bias: Tensor | None, deferral: Deferral) -> Callable[[Tensor], Tensor]:
    """The product with a matrix, `functional.linear`, that defers its gradient."""
    accumulator = deferral.accumulator(weight)

    def of_rows(x: Tensor) -> Tensor:
        if torch.compiler.is_dynamo_compiling():
            return traced.linear(x, weight, bias)
        dtype = compute_dtype(x, weight)
        if x.dtype != dtype:
            x = x.to(dtype)
        use_of = linear_use(accumulator, x)
        output = product(x, accumulator.cast(dtype), bias)
        return defer(output, accumulator, deferral.queue, use_of)

    # A function that called itself would keep itself alive, and its weights: only the garbage collector, which does not
    # look at what a rank is built of, would find them.
    def forward(x: Tensor) -> Tensor:
        return of_rows(x.unsqueeze(0)).squeeze(0) if x.dim() < 2 else of_rows(x)

    return forward


def linear_forward(part: nn.Linear, deferral: Deferral) -> Callable[[Tensor], Tensor]:
    weight, bias = part.weight, part.bias
    multiply, as_covered = product_forward(weight, bias, deferral), Intact(part, deferral)

    def forward(input: Tensor) -> Tensor:
        if torch.compiler.is_dynamo_compiling():
            return multiply(input) if deferral.compiles else functional.linear(input, weight, bias)
        return multiply(input) if as_covered(input) else as_covered.stock(input)

    return forward


def transposed_linear_forward(part: nn.Module, deferral: Deferral) -> Callable[[Tensor], Tensor]:
    """`forward` of a `Conv1D` of transformers, which is a Linear whose matrix [K, N] lies transposed."""
    weight: Tensor = part.weight  # type: ignore[assignment]
    bias: Tensor = part.bias  # type: ignore[assignment]
    accumulator, as_covered = deferral.accumulator(weight), Intact(part, deferral)

    def forward(x: Tensor) -> Tensor:
        if torch.compiler.is_dynamo_compiling():
            if deferral.compiles:
                return traced.transposed_linear(x, weight, bias)
            return torch.addmm(bias, x.view(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[1])
        if not as_covered(x):
            return as_covered.stock(x)
        dtype = compute_dtype(x, weight)
        if x.dtype != dtype:
            x = x.to(dtype)
        use_of = linear_use(accumulator, x, transposed=True)
        rows = torch.addmm(bias.to(dtype), x.view(-1, x.shape[-1]), accumulator.cast(dtype))
        return defer(rows, accumulator, deferral.queue, use_of).view(*x.shape[:-1], weight.shape[1])

    return forward


def embedding_forward(part: nn.Embedding, deferral: Deferral) -> Callable[[Tensor], Tensor]:
    weight, padding_idx = part.weight, part.padding_idx
    accumulator, as_covered = deferral.accumulator(weight), Intact(part, deferral)

    def forward(input: Tensor) -> Tensor:
        if torch.compiler.is_dynamo_compiling():
            if deferral.compiles:
                return traced.embedding(input, weight, padding_idx)
            return functional.embedding(input, weight, padding_idx)
        if not as_covered(input):
            return as_covered.stock(input)
        output = functional.embedding(input, weight.detach(), padding_idx)
        use_of = embedding_use(accumulator, input, padding_idx)
        return defer(output, accumulator, deferral.queue, use_of)

    return forward


def convolution_forward(
    part: nn.Conv1d | nn.Conv2d | nn.Conv3d, deferral: Deferral
) -> Callable[[Tensor], Tensor]:
    spatial = len(part.kernel_size)
    assert not isinstance(part.padding, str)
    geometry = (part.stride, part.padding, part.dilation, False, (0,) * spatial, part.groups)
    weight, bias = part.weight, part.bias
    accumulator, as_covered = deferral.accumulator(weight), Intact(part, deferral)

    def of_batch(x: Tensor) -> Tensor:
        if torch.compiler.is_dynamo_compiling():
            if deferral.compiles:
                return traced.convolution(x, weight, bias, *geometry)
            return torch.convolution(x, weight, bias, *geometry)
        dtype = compute_dtype(x, weight)
        if x.dtype != dtype:
            x = x.to(dtype)
        matrix = accumulator.cast(dtype)
        if bias is None or not (x.device.type == "cpu" and bias.requires_grad and torch.is_grad_enabled()):
            use_of = convolution_use(accumulator, x, geometry)
            output = torch.convolution(x, matrix, None if bias is None else bias.to(dtype), *geometry)
            return defer(output, accumulator, deferral.queue, use_of)
        formed = FormedWithBias(x, matrix, geometry, weight.requires_grad, deferral.queue)
        use_of = convolution_use(accumulator, x, geometry, formed)
        output = torch.convolution(x, matrix, bias.detach().to(dtype), *geometry)
        output = defer(output, accumulator, deferral.queue, use_of)
        return _Bias.apply(output, bias.to(dtype), formed)  # type: ignore[return-value]

    def forward(input: Tensor) -> Tensor:
        if not torch.compiler.is_dynamo_compiling() and not as_covered(input):
            return as_covered.stock(input)
        return of_batch(input.unsqueeze(0)).squeeze(0) if input.dim() == spatial + 1 else of_batch(input)

    return forward
