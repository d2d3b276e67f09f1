"""Pre-norm transformer block and GPT-2's initialisation, which several families use.

Knows nothing of tokens, images or losses. Each matrix is an `nn` module of its own, so that its weight
gradient can be deferred.
"""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from workers.models.definition import LayerBuilder
from workers.models.documents import seen_by_each, with_where

INITIAL_STD = 0.02


def initialise(module: nn.Module) -> None:
    """Normal(0, 0.02) weights and zero biases for every Linear, Embedding and Conv2d in `module`.

    As GPT-2 does (Radford et al. 2019, section 2.3). Draws from torch's global generator, in the order in
    which the modules were made.
    """
    for child in module.modules():
        if isinstance(child, (nn.Linear, nn.Embedding, nn.Conv2d)):
            nn.init.normal_(child.weight, std=INITIAL_STD)
            if not isinstance(child, nn.Embedding) and child.bias is not None:
                nn.init.zeros_(child.bias)


def initialise_residual(projection: nn.Linear, layers: int) -> None:
    """Draw a projection that ends a residual branch: two branches per block add up over `layers` blocks."""
    nn.init.normal_(projection.weight, std=INITIAL_STD / math.sqrt(2 * layers))


class SelfAttention(nn.Module):
    """Multi-head self-attention with one matrix for queries, keys and values."""

    def __init__(self, *, width: int, heads: int, causal: bool, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, documents: Tensor | None = None, *_: Tensor) -> Tensor:
        """x: float[B, T, D] -> float[B, T, D].

        Args:
            documents: as in `seen_by_each`, where several lie in a row. The positions that follow are the embedding's.
        """
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        seen = None if documents is None else seen_by_each(documents)
        causal = self.causal and seen is None
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, is_causal=causal)
        return self.dropout(self.projection(mixed.transpose(1, 2).reshape(batch, length, width)))


class FeedForward(nn.Module):
    """Two linear maps with a GELU between them."""

    def __init__(self, *, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.expansion = nn.Linear(width, hidden)
        self.projection = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x: float[B, T, D] -> float[B, T, D]."""
        return self.dropout(self.projection(F.gelu(self.expansion(x))))


class Block(nn.Module):
    """Pre-norm transformer block: attention, then feed-forward, each on a residual branch with dropout."""

    def __init__(
        self, *, width: int, heads: int, hidden: int, dropout: float, causal: bool, layers: int
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = SelfAttention(width=width, heads=heads, causal=causal, dropout=dropout)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width=width, hidden=hidden, dropout=dropout)
        initialise(self)
        initialise_residual(self.attention.projection, layers)
        initialise_residual(self.feed_forward.projection, layers)

    def forward(self, x: Tensor, *where: Tensor) -> Tensor | tuple[Tensor, ...]:
        """x: float[B, T, D] -> float[B, T, D]; `where` as in `workers/models/documents.py`."""
        x = x + self.attention(self.attention_norm(x), *where)
        return with_where(x + self.feed_forward(self.feed_forward_norm(x)), where)


class AttentionHalf(nn.Module):
    """The first residual branch of a block."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.attention_norm, self.attention = block.attention_norm, block.attention

    def forward(self, x: Tensor, *where: Tensor) -> Tensor | tuple[Tensor, ...]:
        """x: float[B, T, D] -> float[B, T, D]."""
        return with_where(x + self.attention(self.attention_norm(x), *where), where)


class FeedForwardHalf(nn.Module):
    """The second residual branch of a block."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.feed_forward_norm, self.feed_forward = block.feed_forward_norm, block.feed_forward

    def forward(self, x: Tensor, *where: Tensor) -> Tensor | tuple[Tensor, ...]:
        """x: float[B, T, D] -> float[B, T, D]."""
        return with_where(x + self.feed_forward(self.feed_forward_norm(x)), where)


def halves_of(block: LayerBuilder) -> tuple[LayerBuilder, LayerBuilder]:
    """The two layers into which a block is cut, each built of a block of its own, under its own key."""
    return (
        LayerBuilder(f"{block.name}-attention", lambda: AttentionHalf(block.build())),
        LayerBuilder(f"{block.name}-feed_forward", lambda: FeedForwardHalf(block.build())),
    )
