"""Embedding and head of `gpt`; `transformer.py` has its blocks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workers.models.modules.transformer import initialise


class GptEmbedding(nn.Module):
    """Token embedding plus learned position embedding."""

    def __init__(self, *, vocabulary: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        initialise(self)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: int64[B, T], T at most `context` -> float[B, T, D]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.dropout(self.token(tokens) + self.position(positions))


class GptHead(nn.Module):
    """Final norm and projection to the vocabulary, without bias."""

    def __init__(self, *, vocabulary: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.projection = nn.Linear(width, vocabulary, bias=False)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """x: float[B, T, D] -> logits float[B, T, vocabulary]."""
        return self.projection(self.norm(x))
