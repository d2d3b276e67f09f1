"""Decodes images with Pillow, which is imported at first use."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING

from workers.protocol.errors import JobError

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM")
"""Formats that are read. Pillow knows more, and runs other programs for some of them."""
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""Channels -> Pillow's name for images that have them."""


def check_pillow() -> None:
    """Raises:
    JobError: Pillow is not installed.
    """
    try:
        import PIL.Image
        import PIL.ImageOps  # noqa: F401
    except ImportError as error:
        raise JobError(
            f'data.task = "images" needs Pillow, which is not installed: {error}; pip install "freshet[data]"'
        ) from error


def decoder_versions() -> str:
    """Pillow, and its libraries that decide the bits of decoded images, with their versions."""
    import PIL
    from PIL import features

    libraries = ("jpg", "libjpeg_turbo", "webp", "libtiff", "littlecms2")
    found = (f"{name} {features.version(name)}" for name in libraries if features.check(name))
    return ", ".join((f"Pillow {PIL.__version__}", *found))


def decoded_image(encoded: bytes, channels: int, where: str) -> Image.Image:
    """The image in a file's bytes, upright, in a mode with so many channels.

    Args:
        where: it lies, for messages.

    Raises:
        JobError: the bytes are no image, or a damaged one, or the mode is none that is read.
    """
    from PIL import Image, ImageOps

    if channels not in _MODES:
        raise JobError(
            f"the model takes images of {channels} channels, and images have 1, 3 or 4: write a source"
        )
    try:
        image = Image.open(BytesIO(encoded), formats=FORMATS)
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
    except Exception as error:  # as many kinds as there are formats
        raise JobError(
            f"{where} is no image that can be read ({type(error).__name__}: {error}): leave it out, or save it as one"
            f" of {', '.join(FORMATS)}"
        ) from error
    if image.mode[0] in "IF":
        raise JobError(f"{where} has pixels of more than 8 bits ({image.mode}): save it with 8 per channel")
    mode = _MODES[channels]
    if image.mode == mode:
        return image
    try:
        return image.convert(mode)
    except Exception as error:
        raise JobError(
            f"{where} has pixels of the mode {image.mode}, which Pillow does not turn into {mode}: save it as RGB"
        ) from error
