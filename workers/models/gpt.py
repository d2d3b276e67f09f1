"""`gpt`: a decoder-only transformer after GPT-2, as a list of layers.

Knows nothing of how they are cut into stages.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from workers.config import ModelConfig
from workers.models.definition import LayerBuilder, ModelDefinition, ParameterRef
from workers.models.loss import mean_cross_entropy
from workers.models.transformer import Block, initialise


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


def gpt(config: ModelConfig, vocabulary: int) -> ModelDefinition:
    """Layers `embed`, `block0`, ..., `head`. With `tied_embeddings`, embedding and head are one matrix.

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), section 2.3.
    """
    block = partial(
        Block,
        width=config.width,
        heads=config.heads,
        hidden=config.hidden or 4 * config.width,
        dropout=config.dropout,
        causal=True,
        layers=config.layers,
    )
    embed = partial(
        GptEmbedding,
        vocabulary=vocabulary,
        context=config.context,
        width=config.width,
        dropout=config.dropout,
    )
    tie = (ParameterRef("embed", "token.weight"), ParameterRef("head", "projection.weight"))
    return ModelDefinition(
        layers=(
            LayerBuilder("embed", embed),
            *(LayerBuilder(f"block{index}", block) for index in range(config.layers)),
            LayerBuilder("head", partial(GptHead, vocabulary=vocabulary, width=config.width)),
        ),
        loss=mean_cross_entropy,
        ties=(tie,) if config.tied_embeddings else (),
        language=True,
    )
