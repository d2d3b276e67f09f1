"""Predicted inputs of layers that are to be compiled: what will arrive, to its layout."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workers.layers.compiled.shapes import inputs_of_layers
from workers.models.definition import LayerBuilder, ModelDefinition
from workers.models.loss import mean_cross_entropy


class ChannelsLast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to(memory_format=torch.channels_last)


class Branches(nn.Module):
    """Looks at values, so that it runs on zeros, and keeps the layout of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x) if float(x.sum()) >= 0 else x


def test_images_are_predicted_with_their_channels_where_they_lie() -> None:
    kinds = (ChannelsLast, Branches, nn.Identity)
    layers = tuple(LayerBuilder(f"l{n}", kind) for n, kind in enumerate(kinds))
    image = torch.rand(2, 3, 8, 4)
    found, why = inputs_of_layers(
        ModelDefinition(layers, mean_cross_entropy), [image], "float32", torch.device("cpu")
    )
    assert why == ""
    tensor = image
    for kind, (like,) in zip(kinds, found, strict=True):
        assert (like.shape, like.stride) == (tuple(tensor.shape), tensor.stride())
        tensor = kind()(tensor)
