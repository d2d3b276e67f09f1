"""ViT: a transformer that classifies images by a class token."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from workers.models.huggingface.architecture import (
    Architecture,
    Model,
    NormedFeedForward,
    SourceLayer,
    numbered,
)
from workers.models.huggingface.library import Config


class ClassTokenHead(nn.Module):
    """Final norm and logits float[B, classes] from the class token."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.classifier(self.norm(hidden)[:, 0, :])


class VitAttention(nn.Module):
    """The first residual branch of a block."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.layernorm_before, self.attention = whole.layernorm_before, whole.attention
        self.dropout = whole.dropout

    def forward(self, hidden: Tensor) -> Tensor:
        return self.dropout(self.attention(self.layernorm_before(hidden))[0]) + hidden


def _layers(model: Model) -> tuple[SourceLayer, ...]:
    vit, config = model.module, model.config
    return (
        SourceLayer("embed", lambda: vit.ViTEmbeddings(config), {"": "vit.embeddings"}),
        *numbered(
            config.num_hidden_layers,
            lambda index: vit.ViTLayer(config),
            lambda index: {"": f"vit.layers.{index}"},
        ),
        SourceLayer(
            "head", lambda: ClassTokenHead(config), {"norm": "vit.layernorm", "classifier": "classifier"}
        ),
    )


ARCHITECTURE = Architecture(
    {"ViTForImageClassification": ("vit", "image-classification")},
    _layers,
    halves=(
        VitAttention,
        partial(NormedFeedForward, block="", norm="layernorm_after", feed_forward="mlp", dropout="dropout"),
    ),
)
