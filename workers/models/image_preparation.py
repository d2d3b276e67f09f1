"""Preparation of images for a model: their size and their numbers. No torch and no Pillow here, so that any process can
read a spec."""

from __future__ import annotations

from dataclasses import dataclass

BILINEAR = 2
"""Pillow's number of the filter that weighs the nearest pixels."""

Pixels = tuple[int, int]
"""Height and width."""


@dataclass(frozen=True, kw_only=True)
class ImagePreparation:
    """Steps from a decoded image to a model's input float32[channels, *size], in this order."""

    channels: int
    """1: shades of gray, 3: red, green and blue, 4: with opacity."""
    size: Pixels
    """Size of the input."""
    resize: Pixels | int | None
    """Size to which an image is scaled; a number: that of its shorter side, the other one in proportion; None: it must
    have its size."""
    crops: tuple[Pixels, ...] = ()
    """Parts that are cut from the middle, one after another; black where there is no image."""
    resample: int = BILINEAR
    """Pillow's number of the filter that scales."""
    factor: float | None = 1 / 255
    """Number that pixels, 0 to 255, are multiplied by; None: they stay."""
    mean: tuple[float, ...] | None = None
    """Number of each channel that is taken away; None: nothing is."""
    std: tuple[float, ...] | None = None
    """Number of each channel that the rest is divided by; set where `mean` is."""


def usual_preparation(channels: int, size: Pixels) -> ImagePreparation:
    """Scaled to `size` and to numbers from -1 to 1, for a model that says no more of its images."""
    half = (0.5,) * channels
    return ImagePreparation(channels=channels, size=size, resize=size, mean=half, std=half)
