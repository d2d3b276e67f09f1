"""`llama`: a decoder with RMSNorm, rotary positions, grouped queries and SwiGLU, as a list of layers.

Knows nothing of how they are cut into stages.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

from workers.models.families.family import LanguageModel, multiples
from workers.protocol.errors import JobError
from workers.protocol.section import Positive

if TYPE_CHECKING:
    from workers.models.definition import ModelDefinition


class LlamaConfig(LanguageModel):
    """`llama`: a decoder with RMSNorm, rotary positions, grouped queries and SwiGLU, without biases."""

    family: Literal["llama"]
    """This family."""
    kv_heads: Positive | None = None
    """Key and value heads (grouped queries); must divide `heads`. Unset: as many as `heads`."""
    hidden: Positive | None = None
    """Width of the feed-forward layer; unset: 8/3 x width, rounded up to a multiple of 32."""

    def definition(self, vocabulary: int | None) -> ModelDefinition:
        """Layers `embed`, `block0`, ..., `head`. With `tied_embeddings`, embedding and head are one matrix.

        Source: Touvron et al., "LLaMA" (2023), section 2.2; grouped queries as in "Llama 2" (2023), appendix
        A.2.1.
        """
        from workers.models.modules.llama import LlamaBlock, LlamaEmbedding, LlamaHead

        kv_heads = self._kv_heads()
        tokens = self.tokens(vocabulary)
        block = partial(
            LlamaBlock,
            width=self.width,
            heads=self.heads,
            kv_heads=kv_heads,
            hidden=self.hidden or default_hidden(self.width),
            context=self.context,
            dropout=self.dropout,
            layers=self.layers,
        )
        embed = partial(LlamaEmbedding, vocabulary=tokens, width=self.width, dropout=self.dropout)
        head = partial(LlamaHead, vocabulary=tokens, width=self.width)
        return self.stacked(embed, block, head, tied=self.tied_embeddings, language=True)

    def _kv_heads(self) -> int:
        """Raises JobError where they do not divide the heads, or a head cannot be rotated."""
        kv_heads = self.kv_heads or self.heads
        if self.heads % kv_heads:
            raise JobError(
                f"model.heads = {self.heads} is not divisible by model.kv_heads = {kv_heads}:"
                f" choose a number of key and value heads that divides {self.heads}"
            )
        if self.width // self.heads % 2:
            raise JobError(
                f"model.width = {self.width} over model.heads = {self.heads} gives heads of"
                f" {self.width // self.heads}, an odd width that rotary positions cannot halve:"
                f" choose a width of {multiples(self.width, 2 * self.heads)}"
            )
        return kv_heads


def default_hidden(width: int) -> int:
    """8/3 of `width`, rounded up to a multiple of 32: three such matrices have as many parameters as two of 4 x
    width."""
    return 32 * -(-8 * width // 96)
