"""LLaMA and its kin: decoders with rotary positions, for causal language modelling."""

from __future__ import annotations

from functools import partial
from types import ModuleType
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

_KINDS = {"Llama": "llama", "Mistral": "mistral", "Qwen2": "qwen2", "Qwen3": "qwen3"}
"""Begin of the names of the classes -> model type."""
_SUFFIX = "ForCausalLM"


class DecoderEmbedding(nn.Module):
    """Embedding of tokens. Input: tokens int64[B, T], then mask, or documents and positions, if any."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)

    def forward(self, tokens: Tensor, *where: Tensor) -> Tensor | tuple[Tensor, ...]:
        return with_where(self.tokens(tokens), where)


class DecoderBlock(nn.Module):
    """A decoder layer, which makes its own mask and rotary tables of what travels as integers."""

    def __init__(self, module: ModuleType, kind: str, config: Config, index: int) -> None:
        super().__init__()
        self.block: Any = getattr(module, f"{kind}DecoderLayer")(config, index)
        self.rotary = getattr(module, f"{kind}RotaryEmbedding")(config)
        self.config, self.attention = config, _attention(config, index)

    def forward(
        self, hidden: Tensor, mask: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        where = tuple(each for each in (mask, positions) if each is not None)
        at = torch.arange(hidden.shape[1], device=hidden.device)[None] if positions is None else positions
        hidden = self.computed(
            hidden,
            attention_mask=causal_mask(self.config, hidden, self.attention, mask, positions),
            position_embeddings=self.rotary(hidden, position_ids=at),
            position_ids=at,
        )
        return with_where(hidden, where)

    def computed(self, hidden: Tensor, **where: Any) -> Tensor:
        return self.block(hidden, **where)


class DecoderAttention(DecoderBlock):
    """The first residual branch of a block."""

    def __init__(self, whole: DecoderBlock) -> None:
        nn.Module.__init__(self)
        self.block, self.rotary, self.config = whole.block, whole.rotary, whole.config
        self.attention = whole.attention
        del self.block.mlp, self.block.post_attention_layernorm

    def computed(self, hidden: Tensor, **where: Any) -> Tensor:
        return hidden + self.block.self_attn(self.block.input_layernorm(hidden), **where)[0]


class DecoderHead(nn.Module):
    """Final norm and the product with the vocabulary's matrix: logits float[B, T, vocabulary]."""

    def __init__(self, norm: nn.Module, config: Config) -> None:
        super().__init__()
        self.norm = norm
        self.projection = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, hidden: Tensor, *where: Tensor) -> Tensor:
        return self.projection(self.norm(hidden))


def _attention(config: Config, index: int) -> str:
    """Kind of attention of a block: to all positions before, or to those of a window."""
    if config.model_type == "mistral":
        return "full_attention" if config.sliding_window is None else "sliding_attention"
    kinds = getattr(config, "layer_types", None)
    return kinds[index] if kinds else "full_attention"


def _layers(model: Model) -> tuple[SourceLayer, ...]:
    kind, config = model.name.removesuffix(_SUFFIX), model.config

    def head() -> nn.Module:
        norm = getattr(model.module, f"{kind}RMSNorm")(config.hidden_size, config.rms_norm_eps)
        return DecoderHead(norm, config)

    return (
        SourceLayer("embed", lambda: DecoderEmbedding(config), {"tokens": "model.embed_tokens"}),
        *numbered(
            config.num_hidden_layers,
            lambda index: DecoderBlock(model.module, kind, config, index),
            lambda index: {"block": f"model.layers.{index}"},
        ),
        SourceLayer("head", head, {"norm": "model.norm", "projection": "lm_head"}),
    )


ARCHITECTURE = Architecture(
    {f"{kind}{_SUFFIX}": (model_type, "language") for kind, model_type in _KINDS.items()},
    _layers,
    lambda model: tied_head(model.config, "tokens.weight", "projection.weight"),
    (
        DecoderAttention,
        partial(NormedFeedForward, block="block", norm="post_attention_layernorm", feed_forward="mlp"),
    ),
)
