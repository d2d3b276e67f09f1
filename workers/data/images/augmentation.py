"""Random changes of images for training: a crop, a flip, and the operations of RandAugment.

Each change is a pure function of an image and a key, and so is a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.random import Generator, Philox
from numpy.typing import NDArray

from workers.config import AugmentConfig
from workers.data.images.preparing import ImagePreparer
from workers.protocol.errors import JobError

if TYPE_CHECKING:
    from PIL import Image

ATTEMPTS = 10
"""Random crops that are tried before the middle is taken."""
WIDEST = 4 / 3
"""Greatest width of a random crop over its height, and the other way round."""
MAGNITUDES = 30
"""Strength at which an operation of RandAugment does most."""
_SHEAR, _SHIFT, _TURN, _ENHANCE, _BITS = 0.3, 150 / 331, 30.0, 0.9, 4
"""Most that operations do: slope, share of a side, degrees, share of a factor, bits of a pixel."""

Box = tuple[int, int, int, int]
"""Left, top, right and bottom, in pixels."""
Operation = Callable[["Image.Image", float], "Image.Image"]
"""Changes an image by a level from -1 to 1."""


class Augmentation:
    """The changes that `[data.augment]` asks for."""

    def __init__(self, config: AugmentConfig, preparer: ImagePreparer) -> None:
        """Raises:
        JobError: images have channels that the operations do not know.
        """
        if config.operations and preparer.preparation.channels == 4:
            raise JobError(
                "data.augment.operations change images of 1 or 3 channels, and the model takes 4: set it to 0"
            )
        self._config, self._preparer = config, preparer

    def changed(self, image: Image.Image, draw: int) -> Image.Image:
        """`image` at the model's size, changed by chance.

        Args:
            draw: key of the chance.
        """
        from PIL import ImageOps

        config = self._config
        chance = Generator(Philox(key=draw % 2**64))
        # All of them, so that one kind of change leaves the others' chances alone.
        shapes, place, flip = chance.random((ATTEMPTS, 2)), chance.random(2), chance.random()
        chosen = chance.random((config.operations, 2))
        if config.crop is None:
            image = self._preparer.place(image)
        else:
            box = random_box(image.width, image.height, config.crop, shapes, place)
            image = self._preparer.scale(image.crop(box), *self._preparer.preparation.size)
        if flip < config.flip:
            image = ImageOps.mirror(image)
        for which, side in chosen:
            level = config.magnitude / MAGNITUDES * (1 if side < 0.5 else -1)
            image = OPERATIONS[int(which * len(OPERATIONS))](image, level)
        return image


def random_box(
    width: int,
    height: int,
    least: float,
    shapes: NDArray[np.float64],
    place: Sequence[float] | NDArray[np.float64],
) -> Box:
    """Part of an image with `least` to all of its area, and sides of 3:4 to 4:3; where none of those drawn fits, the
    largest such part in the middle.

    Source: Szegedy et al., "Going Deeper with Convolutions" (2015), section 6.

    Args:
        shapes: uniform draws, float64[ATTEMPTS, 2]: of area and of shape.
        place: two more, for left and top.
    """
    for area, shape in shapes:
        pixels = width * height * (least + (1 - least) * area)
        ratio = math.exp(math.log(WIDEST) * (2 * shape - 1))
        wide, high = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
        if 0 < wide <= width and 0 < high <= height:
            left, top = (
                int(draw * (1 + room))
                for draw, room in zip(place, (width - wide, height - high), strict=True)
            )
            return left, top, left + wide, top + high
    wide, high = min(width, round(height * WIDEST)), min(height, round(width * WIDEST))
    left, top = (width - wide) // 2, (height - high) // 2
    return left, top, left + wide, top + high


def _sheared(image: Image.Image, across: float, down: float) -> Image.Image:
    return _mapped(image, (1, across, 0, down, 1, 0))


def _shifted(image: Image.Image, across: float, down: float) -> Image.Image:
    return _mapped(image, (1, 0, int(across * image.width), 0, 1, int(down * image.height)))


def _mapped(image: Image.Image, matrix: tuple[float, ...]) -> Image.Image:
    from PIL.Image import Transform

    return image.transform(image.size, Transform.AFFINE, matrix)


def _enhanced(name: str) -> Operation:
    def change(image: Image.Image, level: float) -> Image.Image:
        from PIL import ImageEnhance

        return getattr(ImageEnhance, name)(image).enhance(1 + _ENHANCE * level)

    return change


def _toned(name: str, argument: Callable[[float], Sequence[Any]] = lambda level: ()) -> Operation:
    def change(image: Image.Image, level: float) -> Image.Image:
        from PIL import ImageOps

        return getattr(ImageOps, name)(image, *argument(abs(level)))

    return change


OPERATIONS: Sequence[Operation] = (
    lambda image, level: image,
    lambda image, level: _sheared(image, _SHEAR * level, 0),
    lambda image, level: _sheared(image, 0, _SHEAR * level),
    lambda image, level: _shifted(image, _SHIFT * level, 0),
    lambda image, level: _shifted(image, 0, _SHIFT * level),
    lambda image, level: image.rotate(_TURN * level),
    *(_enhanced(name) for name in ("Brightness", "Color", "Contrast", "Sharpness")),
    _toned("posterize", lambda level: (8 - round(_BITS * level),)),
    _toned("solarize", lambda level: (round(255 * (1 - level)),)),
    _toned("autocontrast"),
    _toned("equalize"),
)
"""The operations of RandAugment. Source: Cubuk et al., "RandAugment" (2020), section 3; ranges as in torchvision."""
