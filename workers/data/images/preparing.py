"""Prepares decoded images for a model, with the bits of transformers' image processors over Pillow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from workers.models.image_preparation import ImagePreparation, Pixels
from workers.protocol.errors import JobError

if TYPE_CHECKING:
    from PIL import Image


class ImagePreparer:
    """The preparation that a model asks for."""

    def __init__(self, preparation: ImagePreparation) -> None:
        self.preparation = preparation
        self._numbers = _numbers(preparation)

    def place(self, image: Image.Image, where: str = "an image") -> Image.Image:
        """`image`, scaled and cropped.

        Raises:
            JobError: it is then not of the model's size, as nothing scales it; or scaling it takes too much memory.
        """
        preparation = self.preparation
        scaled = self._scaled(image, where)
        if scaled is not None:
            image = self.scale(image, *scaled)
        for crop in preparation.crops:
            image = _middle(image, *crop)
        if _pixels(image) != preparation.size:
            found, asked = (" x ".join(map(str, each)) for each in (_pixels(image), preparation.size))
            raise JobError(
                f"{where} has {found} pixels, and the model takes {asked}, without scaling: scale it"
            )
        return image

    def check(self, image: Image.Image, where: str) -> None:
        """Raises:
        JobError: as `place`.
        """
        if self._scaled(image, where) is None:
            self.place(image, where)

    def _scaled(self, image: Image.Image, where: str) -> Pixels | None:
        """The size to which `image` is scaled; None: it is not.

        Raises:
            JobError: it has too many pixels, as `image` is long and thin.
        """
        from PIL import Image

        resize, most = self.preparation.resize, Image.MAX_IMAGE_PIXELS
        if not isinstance(resize, int):
            return resize
        height, width = _pixels(image)
        longer = int(resize * max(height, width) / min(height, width))
        if most is not None and longer * resize > most:
            raise JobError(
                f"{where} has {height} x {width} pixels, and the model scales the shorter side to {resize} and the"
                f" longer one to {longer:,}, which is more than {most:,} pixels: crop it, or leave it out"
            )
        return (longer, resize) if width <= height else (resize, longer)

    def scale(self, image: Image.Image, height: int, width: int) -> Image.Image:
        """`image` at another size."""
        from PIL.Image import Resampling

        return image.resize((width, height), Resampling(self.preparation.resample))

    def numbers(self, image: Image.Image) -> NDArray[np.float32]:
        """The model's input, float32[C, H, W], of an image of its size and channels."""
        pixels = np.asarray(image)
        if pixels.ndim == 2:
            pixels = pixels[..., np.newaxis]
        return np.stack([table[pixels[..., channel]] for channel, table in enumerate(self._numbers)])


def _numbers(preparation: ImagePreparation) -> NDArray[np.float32]:
    """The number of each pixel value in each channel, float32[C, 256]."""
    # The types of transformers' `rescale` and `normalize`, for the same bits.
    values: NDArray[Any] = np.arange(256, dtype=np.float64)
    if preparation.factor is not None:
        values = values * preparation.factor
    table = np.tile(values.astype(np.float32), (preparation.channels, 1))
    if preparation.mean is not None:
        mean, std = (
            np.array(each, dtype=np.float32)[:, np.newaxis] for each in (preparation.mean, preparation.std)
        )
        table = (table - mean) / std
    return table


def _pixels(image: Image.Image) -> Pixels:
    return image.height, image.width


def _middle(image: Image.Image, height: int, width: int) -> Image.Image:
    """The middle of `image`; black where it ends."""
    top, left = (image.height - height) // 2, (image.width - width) // 2
    return image.crop((left, top, left + width, top + height))
