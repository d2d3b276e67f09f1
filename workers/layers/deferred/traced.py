"""Products with matrices that torch's compiler leaves whole: of a compiled layer, the marks at which gradients are
deferred.

Each is the product of its module in `modules.py`, with the same bits, and of a detached matrix.
`workers/layers/compiled/` puts a tap behind each; a layer that is not compiled never calls them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from workers.layers.deferred.defer import compute_dtype, product


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x: [..., K], weight: [N, K] -> [..., N]."""
    dtype = compute_dtype(x, weight)
    return product(x.to(dtype), weight.detach().to(dtype), bias)


def transposed_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x: [..., K], weight: [K, N] -> [..., N]."""
    dtype = compute_dtype(x, weight)
    rows = x.to(dtype).view(-1, x.shape[-1])
    return torch.addmm(bias.to(dtype), rows, weight.detach().to(dtype)).view(*x.shape[:-1], weight.shape[1])


def embedding(tokens: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
    """tokens: int[...], weight: [V, D] -> [..., D]."""
    return functional.embedding(tokens, weight.detach(), padding_idx)


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
    """x: [B, C, ...], weight: [N, C / groups, ...] -> [B, N, ...]; `geometry` as `torch.convolution` takes it."""
    dtype = compute_dtype(x, weight)
    return torch.convolution(
        x.to(dtype), weight.detach().to(dtype), None if bias is None else bias.to(dtype), *geometry
    )


MARKS = (linear, transposed_linear, embedding, convolution)
