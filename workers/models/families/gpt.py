"""`gpt`: a decoder-only transformer after GPT-2, as a list of layers.

Knows nothing of how they are cut into stages.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

from workers.models.families.family import LanguageModel

if TYPE_CHECKING:
    from workers.models.definition import ModelDefinition


class GptConfig(LanguageModel):
    """`gpt`: a decoder after GPT-2, with learned positions, LayerNorm and GELU."""

    family: Literal["gpt"]
    """This family."""

    def definition(self, vocabulary: int | None) -> ModelDefinition:
        """Layers `embed`, `block0`, ..., `head`. With `tied_embeddings`, embedding and head are one matrix.

        Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), section 2.3.
        """
        from workers.models.modules.gpt import GptEmbedding, GptHead

        tokens = self.tokens(vocabulary)
        embed = partial(
            GptEmbedding, vocabulary=tokens, context=self.context, width=self.width, dropout=self.dropout
        )
        head = partial(GptHead, vocabulary=tokens, width=self.width)
        return self.stacked(embed, self.gpt2_block(), head, tied=self.tied_embeddings, language=True)
