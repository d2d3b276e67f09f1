"""Embedding and head of `vit`; `transformer.py` has its blocks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workers.models.modules.transformer import INITIAL_STD, initialise


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
