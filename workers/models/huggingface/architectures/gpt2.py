"""GPT-2: a decoder with learned positions, for causal language modelling."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workers.models.documents import with_where
from workers.models.huggingface.architecture import (
    Architecture,
    Model,
    NormedFeedForward,
    SourceLayer,
    numbered,
    tied_head,
)
from workers.models.huggingface.library import Config, causal_mask


class Gpt2Embedding(nn.Module):
    """Sum of the embeddings of tokens and positions. Input: tokens int64[B, T], then mask, or documents and
    positions, if any."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.drop = nn.Dropout(config.embd_pdrop)

    def forward(
        self, tokens: Tensor, mask: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        where = tuple(each for each in (mask, positions) if each is not None)
        at = torch.arange(tokens.shape[1], device=tokens.device)[None] if positions is None else positions
        return with_where(self.drop(self.tokens(tokens) + self.positions(at)), where)


class Gpt2Block(nn.Module):
    """A block, which makes its own mask of what travels as integers."""

    def __init__(self, block: nn.Module, config: Config) -> None:
        super().__init__()
        self.block: Any = block
        self.config = config

    def forward(
        self, hidden: Tensor, mask: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        where = tuple(each for each in (mask, positions) if each is not None)
        seen = causal_mask(self.config, hidden, "full_attention", mask, positions)
        return with_where(self.computed(hidden, seen), where)

    def computed(self, hidden: Tensor, seen: Any) -> Tensor:
        return self.block(hidden, attention_mask=seen)


class Gpt2Attention(Gpt2Block):
    """The first residual branch of a block."""

    def __init__(self, whole: Gpt2Block) -> None:
        super().__init__(whole.block, whole.config)
        del self.block.ln_2, self.block.mlp

    def computed(self, hidden: Tensor, seen: Any) -> Tensor:
        return self.block.attn(self.block.ln_1(hidden), attention_mask=seen)[0] + hidden


class Gpt2Head(nn.Module):
    """Final norm and the product with the vocabulary's matrix: logits float[B, T, vocabulary]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.projection = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, hidden: Tensor, *where: Tensor) -> Tensor:
        return self.projection(self.norm(hidden))


def _layers(model: Model) -> tuple[SourceLayer, ...]:
    config = model.config
    embedded = {"tokens": "transformer.wte", "positions": "transformer.wpe"}
    return (
        SourceLayer("embed", lambda: Gpt2Embedding(config), embedded),
        *numbered(
            config.num_hidden_layers,
            lambda index: Gpt2Block(model.module.GPT2Block(config, layer_idx=index), config),
            lambda index: {"block": f"transformer.h.{index}"},
        ),
        SourceLayer("head", lambda: Gpt2Head(config), {"norm": "transformer.ln_f", "projection": "lm_head"}),
    )


ARCHITECTURE = Architecture(
    {"GPT2LMHeadModel": ("gpt2", "language")},
    _layers,
    lambda model: tied_head(model.config, "tokens.weight", "projection.weight"),
    (Gpt2Attention, partial(NormedFeedForward, block="block", norm="ln_2", feed_forward="mlp")),
)
