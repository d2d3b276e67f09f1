"""Forward passes of Linear, Embedding and Conv modules with their weight gradients deferred."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.deferred.defer import Held, add_product_, adds_wide, compute_dtype, defer, product
from workers.deferred.queue import Deferral, Use
from workers.state.flat import grad_dtype


def linear_forward(weight: Tensor, bias: Tensor | None, deferral: Deferral) -> Callable[[Tensor], Tensor]:
    accumulator, total = deferral.accumulator(weight), grad_dtype(weight)

    def of_rows(x: Tensor) -> Tensor:
        dtype = compute_dtype(x, weight)
        if x.dtype != dtype:
            x = x.to(dtype)
        held = Held(x)
        wide = adds_wide(x, total)

        def use_of(grad: Tensor) -> Use:
            x = held.take()
            x_rows, rows = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])

            def form(out: Tensor | None) -> Tensor:
                return torch.mm(rows.t(), x_rows, out=out) if out is not None else torch.mm(rows.t(), x_rows)

            def add(total: Tensor) -> None:
                add_product_(total, rows.t(), x_rows)

            return Use(accumulator, form, dtype, add if wide else None)

        output = product(x, accumulator.cast(dtype), bias)
        return defer(output, accumulator, deferral.queue, use_of)

    # A function that called itself would keep itself alive, and its weights: only the garbage collector, which does not
    # look at what a rank is built of, would find them.
    def forward(x: Tensor) -> Tensor:
        return of_rows(x.unsqueeze(0)).squeeze(0) if x.dim() < 2 else of_rows(x)

    return forward


def embedding_forward(module: nn.Embedding, deferral: Deferral) -> Callable[[Tensor], Tensor]:
    given = module.padding_idx
    padding_idx = -1 if given is None else given
    accumulator, parameter = deferral.accumulator(module.weight), module.weight
    dtype = grad_dtype(parameter)

    def forward(tokens: Tensor) -> Tensor:
        def use_of(grad: Tensor) -> Use:
            def form(out: Tensor | None) -> Tensor:
                # Added row by row, which 16 bits would not bear: a frequent token has hundreds of rows.
                dense = torch.ops.aten.embedding_dense_backward(
                    grad.to(dtype), tokens, parameter.shape[0], padding_idx, False
                )
                return dense if out is None else out.copy_(dense)

            return Use(accumulator, form, dtype)

        output = functional.embedding(tokens, parameter.detach(), given)
        return defer(output, accumulator, deferral.queue, use_of)

    return forward


def convolution_forward(
    module: nn.Conv1d | nn.Conv2d | nn.Conv3d, deferral: Deferral
) -> Callable[[Tensor], Tensor]:
    spatial = len(module.kernel_size)
    assert not isinstance(module.padding, str)
    geometry = (module.stride, module.padding, module.dilation, False, (0,) * spatial, module.groups)
    accumulator, bias, sizes = deferral.accumulator(module.weight), module.bias, [module.out_channels]

    def of_batch(x: Tensor) -> Tensor:
        dtype = compute_dtype(x, accumulator.parameter)
        if x.dtype != dtype:
            x = x.to(dtype)
        weight = accumulator.cast(dtype)
        held = Held(x)

        def use_of(grad: Tensor) -> Use:
            x = held.take()

            def form(out: Tensor | None) -> Tensor:
                formed = torch.ops.aten.convolution_backward(
                    grad, x, weight, sizes, *geometry, [False, True, False]
                )[1]
                return formed if out is None else out.copy_(formed)

            return Use(accumulator, form, dtype)

        output = torch.convolution(x, weight, None if bias is None else bias.to(dtype), *geometry)
        return defer(output, accumulator, deferral.queue, use_of)

    def forward(x: Tensor) -> Tensor:
        return of_batch(x.unsqueeze(0)).squeeze(0) if x.dim() == spatial + 1 else of_batch(x)

    return forward
