"""Embedding and head of `gpt`; `transformer.py` has its blocks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workers.models.documents import with_where
from workers.models.modules.transformer import initialise


class GptEmbedding(nn.Module):
    """Token embedding plus learned position embedding."""

    def __init__(self, *, vocabulary: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        initialise(self)

    def forward(
        self, tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        """tokens: int64[B, T], T at most `context` -> float[B, T, D]; the others: `workers/models/documents.py`."""
        where = tuple(each for each in (documents, positions) if each is not None)
        at = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
        return with_where(self.dropout(self.token(tokens) + self.position(at)), where)


class GptHead(nn.Module):
    """Final norm and projection to the vocabulary, without bias."""

    def __init__(self, *, vocabulary: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.projection = nn.Linear(width, vocabulary, bias=False)
        initialise(self)

    def forward(self, x: Tensor, *where: Tensor) -> Tensor:
        """x: float[B, T, D] -> logits float[B, T, vocabulary]."""
        return self.projection(self.norm(x))
