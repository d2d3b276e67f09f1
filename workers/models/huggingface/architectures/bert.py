"""BERT: an encoder of text, for classes of sequences, answers in a context, or masked tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from workers.models.documents import with_where
from workers.models.huggingface.architecture import (
    Architecture,
    Model,
    SourceLayer,
    Task,
    Ties,
    numbered,
    tied_head,
)
from workers.models.huggingface.library import Config, two_way_mask

_SOURCES: dict[Task, dict[str, str]] = {
    "sequence-classification": {"pooler": "bert.pooler", "classifier": "classifier"},
    "question-answering": {"outputs": "qa_outputs"},
    "masked-language": {"predictions": "cls.predictions"},
}
"""Modules of each head -> their paths."""


class BertEmbedding(nn.Module):
    """Input: tokens int64[B, T], then the mask int64[B, T], then the segment of each token int64[B, T], if any."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings

    def forward(
        self, tokens: Tensor, mask: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        hidden = self.embeddings(input_ids=tokens, token_type_ids=segments)
        return with_where(hidden, () if mask is None else (mask,))


class EncoderBlock(nn.Module):
    """An encoder layer, which makes its own mask of the one that travels."""

    def __init__(self, block: nn.Module, config: Config) -> None:
        super().__init__()
        self.block: Any = block
        self.config = config

    def forward(self, hidden: Tensor, *where: Tensor) -> Tensor | tuple[Tensor, ...]:
        seen = two_way_mask(self.config, hidden, where[0] if where else None)
        return with_where(self.computed(hidden, seen), where)

    def computed(self, hidden: Tensor, seen: Any) -> Tensor:
        return self.block(hidden, seen)


class EncoderAttention(EncoderBlock):
    """The first residual branch of a block, with the norm after it."""

    def __init__(self, whole: EncoderBlock) -> None:
        super().__init__(whole.block, whole.config)
        del self.block.intermediate, self.block.output

    def computed(self, hidden: Tensor, seen: Any) -> Tensor:
        return self.block.attention(hidden, seen)[0]


class EncoderFeedForward(nn.Module):
    """The second one."""

    def __init__(self, whole: EncoderBlock) -> None:
        super().__init__()
        self.block: Any = whole.block
        del self.block.attention

    def forward(self, hidden: Tensor, *where: Tensor) -> Tensor | tuple[Tensor, ...]:
        return with_where(self.block.feed_forward_chunk(hidden), where)


class SequenceHead(nn.Module):
    """Logits float[B, classes] from the first token."""

    def __init__(self, pooler: nn.Module, config: Config) -> None:
        super().__init__()
        dropout = (
            config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        )
        self.pooler, self.dropout = pooler, nn.Dropout(dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, hidden: Tensor, *where: Tensor) -> Tensor:
        return self.classifier(self.dropout(self.pooler(hidden)))


class AnswerHead(nn.Module):
    """Logits float[B, T, 2]: of each token as the answer's first and as its last."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.outputs = nn.Linear(config.hidden_size, 2)

    def forward(self, hidden: Tensor, *where: Tensor) -> Tensor:
        return self.outputs(hidden)


class MaskedTokenHead(nn.Module):
    """Logits float[B, T, vocabulary]."""

    def __init__(self, predictions: nn.Module) -> None:
        super().__init__()
        self.predictions = predictions
        predictions.decoder.bias = predictions.bias  # type: ignore[union-attr]

    def forward(self, hidden: Tensor, *where: Tensor) -> Tensor:
        return self.predictions(hidden)


def _layers(model: Model) -> tuple[SourceLayer, ...]:
    bert, config = model.module, model.config
    heads = {
        "sequence-classification": lambda: SequenceHead(bert.BertPooler(config), config),
        "question-answering": lambda: AnswerHead(config),
        "masked-language": lambda: MaskedTokenHead(bert.BertLMPredictionHead(config)),
    }
    return (
        SourceLayer(
            "embed", lambda: BertEmbedding(bert.BertEmbeddings(config)), {"embeddings": "bert.embeddings"}
        ),
        *numbered(
            config.num_hidden_layers,
            lambda index: EncoderBlock(bert.BertLayer(config, layer_idx=index), config),
            lambda index: {"block": f"bert.encoder.layer.{index}"},
        ),
        SourceLayer("head", heads[model.task], _SOURCES[model.task]),
    )


def _ties(model: Model) -> Ties:
    if model.task != "masked-language":
        return ()
    return tied_head(model.config, "embeddings.word_embeddings.weight", "predictions.decoder.weight")


ARCHITECTURE = Architecture(
    {
        "BertForSequenceClassification": ("bert", "sequence-classification"),
        "BertForQuestionAnswering": ("bert", "question-answering"),
        "BertForMaskedLM": ("bert", "masked-language"),
    },
    _layers,
    _ties,
    (EncoderAttention, EncoderFeedForward),
)
