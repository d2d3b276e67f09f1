"""`vit`: a vision transformer that classifies images, as a list of layers.

Knows nothing of how they are cut into stages.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from workers.config import ModelConfig
from workers.models.definition import LayerBuilder, ModelDefinition
from workers.models.loss import mean_cross_entropy
from workers.models.transformer import INITIAL_STD, Block, initialise


class VitEmbedding(nn.Module):
    """Patches through a strided convolution, a class token before them, learned positions."""

    def __init__(
        self, *, image_size: int, patch_size: int, channels: int, width: int, dropout: float
    ) -> None:
        super().__init__()
        patches = (image_size // patch_size) ** 2
        self.patch = nn.Conv2d(channels, width, patch_size, stride=patch_size)
        # One dimension, so that weight decay leaves it out, as it does biases.
        self.class_token = nn.Parameter(torch.empty(width))
        self.position = nn.Parameter(torch.empty(1 + patches, width))
        self.dropout = nn.Dropout(dropout)
        initialise(self)
        nn.init.normal_(self.class_token, std=INITIAL_STD)
        nn.init.normal_(self.position, std=INITIAL_STD)

    def forward(self, images: Tensor) -> Tensor:
        """images: float[B, C, H, W] -> float[B, 1 + patches, D], the class token first."""
        patches = self.patch(images).flatten(2).transpose(1, 2)
        class_token = self.class_token.expand(images.shape[0], 1, -1)
        return self.dropout(torch.cat((class_token, patches), dim=1) + self.position)


class VitHead(nn.Module):
    """Final norm and classifier on the class token."""

    def __init__(self, *, width: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """x: float[B, 1 + patches, D] -> logits float[B, classes]."""
        return self.classifier(self.norm(x[:, 0]))


def vit(config: ModelConfig) -> ModelDefinition:
    """Layers `embed`, `block0`, ..., `head`.

    Source: Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021), eq. 1-4.
    """
    embed = partial(
        VitEmbedding,
        image_size=config.image_size,
        patch_size=config.patch_size,
        channels=config.channels,
        width=config.width,
        dropout=config.dropout,
    )
    block = partial(
        Block,
        width=config.width,
        heads=config.heads,
        hidden=config.hidden or 4 * config.width,
        dropout=config.dropout,
        causal=False,
        layers=config.layers,
    )
    return ModelDefinition(
        layers=(
            LayerBuilder("embed", embed),
            *(LayerBuilder(f"block{index}", block) for index in range(config.layers)),
            LayerBuilder("head", partial(VitHead, width=config.width, classes=config.classes)),
        ),
        loss=mean_cross_entropy,
    )
