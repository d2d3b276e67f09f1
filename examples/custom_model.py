"""A model of your own, a small convolution net for the digits: a list of layer builders and a loss.

It needs nothing from Freshet. In a spec:

    [model]
    factory = "examples.custom_model:convolutions"
    arguments = { width = 32, blocks = 4 }

    [data]
    source = "digits"

Each builder is called only on the rank that holds its layer, and a layer takes what the one before it
returned.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn


class ResidualConvolution(nn.Module):
    """Two convolutions on a residual branch. The branch lies within one layer: a layer is never cut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(width)
        self.expansion = nn.Conv2d(width, 2 * width, kernel_size=3, padding=1)
        self.projection = nn.Conv2d(2 * width, width, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        """x: float[B, width, H, W] -> the same shape."""
        return x + self.projection(F.gelu(self.expansion(self.norm(x))))


class Classifier(nn.Module):
    """One linear map of all pixels."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        """x: float[B, width, H, W] -> logits float[B, classes]."""
        return self.linear(x.flatten(1))


def convolutions(
    width: int = 32, blocks: int = 4, image_size: int = 8, classes: int = 10
) -> tuple[list[tuple[str, Callable[[], nn.Module]]], Callable[..., Tensor]]:
    """The layers `stem`, `block0`, ..., `classifier`, and the loss."""
    layers: list[tuple[str, Callable[[], nn.Module]]] = [
        ("stem", partial(nn.Conv2d, 1, width, kernel_size=3, padding=1)),
        *((f"block{index}", partial(ResidualConvolution, width)) for index in range(blocks)),
        ("classifier", partial(Classifier, width * image_size**2, classes)),
    ]
    return layers, F.cross_entropy
