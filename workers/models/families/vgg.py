"""`vgg`: a network of convolutions that classifies images, as a list of layers.

Knows nothing of how they are cut into stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Literal

from workers.models.families.family import ImageModel
from workers.protocol.errors import JobError
from workers.protocol.section import Fraction, Positive

if TYPE_CHECKING:
    from workers.models.definition import ModelDefinition

CONVOLUTIONS: Mapping[int, tuple[int, ...]] = {
    11: (1, 1, 2, 2, 2),
    13: (2, 2, 2, 2, 2),
    16: (2, 2, 3, 3, 3),
    19: (2, 2, 4, 4, 4),
}
"""Layers with weights -> convolutions of each of the five stages."""


class VggConfig(ImageModel):
    """`vgg`: convolutions and dense layers after VGG, each one layer; 13 and 3 of them in VGG-16."""

    cost_keys = ("family", "depth", "image_size", "channels", "dropout")
    family: Literal["vgg"]
    """This family."""
    image_size: Positive = 32
    """Side of the square input images, in pixels; a multiple of 32."""
    channels: Positive = 3
    """Channels of the input images."""
    depth: Literal[11, 13, 16, 19] = 16
    """Layers with weights."""
    width: Positive = 64
    """Channels of the first stage; later ones have 2, 4, 8 and 8 times as many."""
    hidden: Positive = 4096
    """Width of the dense layers."""
    dropout: Fraction = 0.5
    """Dropout probability after each dense layer."""

    def definition(self, vocabulary: int | None) -> ModelDefinition:
        """Layers `conv0`, `conv1`, ..., `dense0`, `dense1`, `head`.

        Source: Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition" (2015),
        table 1, columns A, B, D and E.
        """
        from workers.metrics.measures import OfClasses
        from workers.models.definition import LayerBuilder, ModelDefinition
        from workers.models.loss import mean_cross_entropy
        from workers.models.modules.vgg import VggConvolution, VggDense, VggHead

        if self.image_size % 32:
            raise JobError(
                f"model.image_size = {self.image_size} is not divisible by 32, and the five stages of vgg halve an"
                f" image five times: choose {32 * -(-self.image_size // 32)}"
            )
        layers: list[LayerBuilder] = []
        inputs = self.channels
        for count, factor in zip(CONVOLUTIONS[self.depth], (1, 2, 4, 8, 8), strict=True):
            for number in range(count):
                outputs, pooled = self.width * factor, number == count - 1
                build = partial(VggConvolution, inputs=inputs, outputs=outputs, pooled=pooled)
                layers.append(LayerBuilder(f"conv{len(layers)}", build))
                inputs = outputs
        flat = inputs * (self.image_size // 32) ** 2
        dense = partial(VggDense, outputs=self.hidden, dropout=self.dropout)
        layers.append(LayerBuilder("dense0", partial(dense, inputs=flat)))
        layers.append(LayerBuilder("dense1", partial(dense, inputs=self.hidden)))
        layers.append(LayerBuilder("head", partial(VggHead, inputs=self.hidden, classes=self.classes)))
        return ModelDefinition(tuple(layers), mean_cross_entropy, measure=OfClasses())
