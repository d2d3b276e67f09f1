"""A model with large messages, as most real jobs have. Each rank imports this module by its import path."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from workers.models.definition import LayerBuilder, ModelDefinition

WIDTH = 2_000_000


class Spread(nn.Module):
    """int64[B, T] -> float32[B, WIDTH]"""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens.float().mean(-1, keepdim=True) / 256 * self.scale


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def distance(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.mean(-1) - targets.float().mean(-1) / 256).square().mean()


def model() -> ModelDefinition:
    kinds: Sequence[type[nn.Module]] = (Spread, Scale, Scale)
    return ModelDefinition(
        tuple(LayerBuilder(f"l{index}", kind) for index, kind in enumerate(kinds)), distance
    )
