"""Layers of `llama`: RMSNorm, rotary positions, grouped queries and SwiGLU, without biases anywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from workers.models.documents import seen_by_each, with_where
from workers.models.modules.transformer import initialise, initialise_residual

ROTARY_BASE = 10_000.0


class RMSNorm(nn.Module):
    """Root-mean-square norm with a gain, in float32 whatever the input (Zhang and Sennrich 2019, eq. 4)."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """x: float[..., D] -> float[..., D]."""
        if x.is_cuda and x.dtype == self.weight.dtype:
            # One kernel, which also computes in float32. That of a CPU has other bits than these lines.
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight).type_as(x)


class Rotary(nn.Module):
    """Rotary position embedding (Su et al. 2021, eq. 34), turning one half of a head against the other; in float32
    whatever the input."""

    cosine: Tensor
    """[context, head_width], the same for both halves."""
    sine: Tensor
    """[context, head_width / 2]"""
    minus_sine: Tensor

    def __init__(self, *, head_width: int, context: int) -> None:
        super().__init__()
        frequencies = ROTARY_BASE ** (-np.arange(0, head_width, 2) / head_width)
        angles = np.outer(np.arange(context), frequencies)
        sine = torch.from_numpy(np.sin(angles).astype(np.float32))
        cosine = torch.from_numpy(np.cos(angles).astype(np.float32))
        # Functions of the sizes alone: in no checkpoint and in no digest.
        for name, table in (
            ("cosine", torch.cat((cosine, cosine), 1)),
            ("sine", sine),
            ("minus_sine", -sine),
        ):
            self.register_buffer(name, table, persistent=False)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """x: float[B, heads, T, head_width] -> the same shape, position t rotated by t.

        Args:
            positions: int64[B, T]; None: 0 to T - 1.
        """
        length, half = x.shape[-2], x.shape[-1] // 2
        cosine, sine, minus_sine = (
            table[:length] if positions is None else table[positions][:, None]
            for table in (self.cosine, self.sine, self.minus_sine)
        )
        if not torch.compiler.is_dynamo_compiling():
            return _Turn.apply(x, cosine, sine, minus_sine)  # type: ignore[return-value]
        # The compiler makes one kernel of these lines, which it can look into.
        cosine = cosine[..., :half]
        first, second = x.float().chunk(2, dim=-1)
        rotated = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
        return rotated.type_as(x)


class _Turn(torch.autograd.Function):
    """The rotation in four kernels, and four back. What autograd makes of its formula takes 7 and 9, in 16 bits 9 and
    11; the bits are the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor, minus_sine: Tensor) -> Tensor:
        ctx.tables = cosine, sine, minus_sine
        return _turned(x, cosine, minus_sine, sine, x.new_empty(x.shape))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        cosine, sine, minus_sine = ctx.tables
        batch, heads, length, width = grad.shape
        # Laid out as what the projection returned: its gradient is taken as it is.
        found = grad.new_empty(batch, length, heads, width).transpose(1, 2)
        return _turned(grad, cosine, sine, minus_sine, found), None, None, None


def _turned(x: Tensor, cosine: Tensor, from_second: Tensor, from_first: Tensor, out: Tensor) -> Tensor:
    """x * cosine + (second half * from_second, first half * from_first), rounded to the dtype of `out` in the end."""
    first, second = x.chunk(2, dim=-1)
    own = x * cosine
    other = torch.empty_like(own)
    into_first, into_second = other.chunk(2, dim=-1)
    torch.mul(second, from_second, out=into_first)
    torch.mul(first, from_first, out=into_second)
    return torch.add(own, other, out=out)


class GroupedQueryAttention(nn.Module):
    """Causal attention whose query heads share keys and values in groups (Ainslie et al. 2023, sec. 2.2)."""

    def __init__(self, *, width: int, heads: int, kv_heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_width = width // heads
        self.query = nn.Linear(width, heads * self.head_width, bias=False)
        self.key = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.value = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.projection = nn.Linear(heads * self.head_width, width, bias=False)
        self.rotary = Rotary(head_width=self.head_width, context=context)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, documents: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """x: float[B, T, D] -> float[B, T, D]; the others as in `workers/models/documents.py`."""
        batch, length, width = x.shape
        seen = None if documents is None else seen_by_each(documents)

        def split(projected: Tensor, heads: int) -> Tensor:
            return projected.view(batch, length, heads, self.head_width).transpose(1, 2)

        query = self.rotary(split(self.query(x), self.heads), positions)
        key = self.rotary(split(self.key(x), self.kv_heads), positions)
        value = split(self.value(x), self.kv_heads)
        # Flash attention reads each group's keys and values where they are, with the bits of repeated ones. Other
        # kernels, which take masks, would repeat them, or form the whole matrix of weights.
        grouped = query.is_cuda and query.element_size() == 2 and seen is None
        if not grouped:
            key, value = self._per_query_head(key), self._per_query_head(value)
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, is_causal=seen is None, enable_gqa=grouped
        )
        return self.dropout(self.projection(mixed.transpose(1, 2).reshape(batch, length, width)))

    def _per_query_head(self, x: Tensor) -> Tensor:
        """x: float[B, kv_heads, T, head_width] -> float[B, heads, T, head_width]."""
        group = self.heads // self.kv_heads
        if group == 1:
            return x
        return x.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(1, 2)


class SwiGLU(nn.Module):
    """Gated feed-forward layer (Shazeer 2020, eq. 6)."""

    def __init__(self, *, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.expansion = nn.Linear(width, hidden, bias=False)
        self.projection = nn.Linear(hidden, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x: float[B, T, D] -> float[B, T, D]."""
        return self.dropout(self.projection(F.silu(self.gate(x)) * self.expansion(x)))


class LlamaEmbedding(nn.Module):
    """Token embedding; the rotary embedding of every block adds the positions."""

    def __init__(self, *, vocabulary: int, width: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(dropout)
        initialise(self)

    def forward(self, tokens: Tensor, *where: Tensor) -> Tensor | tuple[Tensor, ...]:
        """tokens: int64[B, T] -> float[B, T, D]; `where` as in `workers/models/documents.py`."""
        return with_where(self.dropout(self.token(tokens)), where)


class LlamaBlock(nn.Module):
    """Pre-norm block: attention, then SwiGLU, each on a residual branch with dropout."""

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        kv_heads: int,
        hidden: int,
        context: int,
        dropout: float,
        layers: int,
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(width)
        self.attention = GroupedQueryAttention(
            width=width, heads=heads, kv_heads=kv_heads, context=context, dropout=dropout
        )
        self.feed_forward_norm = RMSNorm(width)
        self.feed_forward = SwiGLU(width=width, hidden=hidden, dropout=dropout)
        initialise(self)
        initialise_residual(self.attention.projection, layers)
        initialise_residual(self.feed_forward.projection, layers)

    def forward(self, x: Tensor, *where: Tensor) -> Tensor | tuple[Tensor, ...]:
        """x: float[B, T, D] -> float[B, T, D]; `where` as in `workers/models/documents.py`."""
        x = x + self.attention(self.attention_norm(x), *where)
        return with_where(x + self.feed_forward(self.feed_forward_norm(x)), where)


class LlamaHead(nn.Module):
    """Final norm and projection to the vocabulary."""

    def __init__(self, *, vocabulary: int, width: int) -> None:
        super().__init__()
        self.norm = RMSNorm(width)
        self.projection = nn.Linear(width, vocabulary, bias=False)
        initialise(self)

    def forward(self, x: Tensor, *where: Tensor) -> Tensor:
        """x: float[B, T, D] -> logits float[B, T, vocabulary]."""
        return self.projection(self.norm(x))
