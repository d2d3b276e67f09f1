"""Small random images, as files in a folder of classes."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

CHANNELS = {"L": (), "RGB": (3,), "RGBA": (4,)}
CLASSES = ("cat", "dog", "eel")


def image_of(mode: str = "RGB", width: int = 12, height: int = 9, seed: int = 0) -> Image.Image:
    """An image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, *CHANNELS[mode]), dtype=np.uint8)
    return Image.fromarray(pixels)


def encoded(image: Image.Image, format: str = "PNG") -> bytes:
    """The bytes of an image file."""
    buffer = BytesIO()
    image.save(buffer, format)
    return buffer.getvalue()


def write_folder(folder: Path, count: int = 12, *, mode: str = "RGB", first: int = 0) -> Path:
    """A folder with `count` images, in turn of each class; image n is that of seed `first` + n."""
    for number in range(first, first + count):
        file = folder / CLASSES[number % len(CLASSES)] / f"{number:03}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        image_of(mode, seed=number).save(file)
    return folder
