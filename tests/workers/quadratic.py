"""A job of known curvature: every layer shifts its input; the loss is the squared distance to a target."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workers.data.dataset import Batch
from workers.models.definition import LayerBuilder, ModelDefinition, ParameterRef

FACTORS = (1.0, 2.0, 0.5, 1.5)
"""The factor by which each layer multiplies the parameter that it adds."""
SMOOTHNESS = sum(factor * factor for factor in FACTORS)
"""The Hessian's only eigenvalue above 0. All gradients lie along its eigenvector."""
WIDTH = 6


class Alike:
    """A data set whose samples are all the same."""

    train_samples = 64
    validation_samples = 8

    def train(self, indices: list[int]) -> Batch:
        x = torch.arange(WIDTH, dtype=torch.float32).expand(len(indices), WIDTH).contiguous()
        return Batch((x,), (x.flip(1).contiguous(),))

    def validation(self, indices: list[int]) -> Batch:
        return self.train(indices)


class Shift(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x + self.factor * self.shift


def half_squared_distance(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs - targets).square().sum() / len(outputs)


def model(tied: bool = False) -> ModelDefinition:
    """A model of four layers. If `tied`, the first and the last share their parameter and have one factor."""
    factors = (*FACTORS[:3], FACTORS[0]) if tied else FACTORS
    layers = tuple(
        LayerBuilder(f"l{index}", lambda factor=factor: Shift(factor)) for index, factor in enumerate(factors)
    )
    ties = ((ParameterRef("l0", "shift"), ParameterRef("l3", "shift")),) if tied else ()
    return ModelDefinition(layers, half_squared_distance, ties)
