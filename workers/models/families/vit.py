"""`vit`: a vision transformer that classifies images, as a list of layers.

Knows nothing of how they are cut into stages.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

from workers.models.families.family import ImageModel, TransformerSizes
from workers.protocol.errors import JobError
from workers.protocol.section import Positive

if TYPE_CHECKING:
    from workers.models.definition import ModelDefinition


class VitConfig(ImageModel, TransformerSizes):
    """`vit`: a vision transformer that classifies images by a class token."""

    cost_keys = ("family", "heads", "image_size", "patch_size", "channels", "dropout")
    family: Literal["vit"]
    """This family."""
    patch_size: Positive = 2
    """Side of a patch, in pixels; must divide `image_size`."""

    def definition(self, vocabulary: int | None) -> ModelDefinition:
        """Layers `embed`, `block0`, ..., `head`.

        Source: Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021), eq. 1-4.
        """
        from workers.models.modules.vit import VitEmbedding, VitHead

        if self.image_size % self.patch_size:
            raise JobError(
                f"model.image_size = {self.image_size} is not divisible by"
                f" model.patch_size = {self.patch_size}: choose a patch size that divides it"
            )
        embed = partial(
            VitEmbedding,
            image_size=self.image_size,
            patch_size=self.patch_size,
            channels=self.channels,
            width=self.width,
            dropout=self.dropout,
        )
        head = partial(VitHead, width=self.width, classes=self.classes)
        return self.stacked(embed, self.gpt2_block(causal=False), head)
