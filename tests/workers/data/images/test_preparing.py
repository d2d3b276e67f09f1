"""Images become the numbers that transformers' image processors over Pillow make of them, bit for bit."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import encoded, image_of
from PIL import Image
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.convnext.image_processing_pil_convnext import ConvNextImageProcessorPil
from transformers.models.deit.image_processing_pil_deit import DeiTImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from workers.data.images.decoding import decoded_image
from workers.data.images.preparing import ImagePreparer
from workers.models.huggingface.processor import preparation_of, read_processor
from workers.models.image_preparation import usual_preparation
from workers.protocol.errors import JobError

OWN: dict[str, Any] = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.7]}
PROCESSORS: dict[str, tuple[Any, dict[str, Any]]] = {
    "vit": (ViTImageProcessorPil, {"size": {"height": 16, "width": 10}}),
    "vit as it comes": (ViTImageProcessorPil, {}),
    "vit, cubic, own mean": (ViTImageProcessorPil, {"size": 13, "resample": 3, **OWN}),
    "vit, nearest, other factor": (ViTImageProcessorPil, {"size": 13, "resample": 0, "rescale_factor": 0.01}),
    "vit, pixels from 0 to 1": (ViTImageProcessorPil, {"size": 13, "do_normalize": False}),
    "vit, pixels as they are": (
        ViTImageProcessorPil,
        {"size": 13, "do_normalize": False, "do_rescale": False},
    ),
    "vit, normalized only": (ViTImageProcessorPil, {"size": 13, "do_rescale": False, **OWN}),
    "vit, cropped only": (
        ViTImageProcessorPil,
        {"do_resize": False, "do_center_crop": True, "crop_size": {"height": 7, "width": 8}},
    ),
    "convnext": (ConvNextImageProcessorPil, {"size": {"shortest_edge": 16}}),
    "convnext, own part": (
        ConvNextImageProcessorPil,
        {"size": {"shortest_edge": 15}, "crop_pct": 0.7, **OWN},
    ),
    "convnext, large": (ConvNextImageProcessorPil, {"size": {"shortest_edge": 384}}),
    "convnext, cropped again": (
        ConvNextImageProcessorPil,
        {"size": {"shortest_edge": 16}, "do_center_crop": True, "crop_size": {"height": 5, "width": 8}},
    ),
    "deit": (DeiTImageProcessorPil, {"size": {"height": 20, "width": 20}, "crop_size": 16}),
    "bit": (BitImageProcessorPil, {"size": {"shortest_edge": 9}, "crop_size": {"height": 9, "width": 9}}),
    "clip, black around": (CLIPImageProcessorPil, {"size": {"shortest_edge": 6}, "crop_size": 12}),
}


@pytest.mark.parametrize("case", PROCESSORS)
def test_numbers_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    kind, settings = PROCESSORS[case]
    processor = kind(**settings)
    processor.save_pretrained(tmp_path)
    preparer = ImagePreparer(preparation_of(read_processor(tmp_path), 3, (224, 224)))
    for width, height in ((12, 9), (9, 12), (31, 47), (16, 16)):
        image = image_of(width=width, height=height, seed=width)
        expected = processor(image)["pixel_values"][0]
        found = preparer.numbers(preparer.place(image))
        assert found.dtype == np.float32
        assert found.shape == (3, *preparer.preparation.size)
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF"])
def test_images_in_shades_of_gray_and_of_any_format(format: str) -> None:
    file = encoded(image_of("L", 20, 14), format)
    processor = ViTImageProcessorPil(size=11, image_mean=[0.3], image_std=[0.6])
    fields = {**processor.to_dict(), "image_processor_type": "ViTImageProcessor"}
    preparer = ImagePreparer(preparation_of(fields, 1, (11, 11)))
    expected = processor(Image.open(BytesIO(file)).convert("L"))["pixel_values"][0]
    assert np.array_equal(preparer.numbers(preparer.place(decoded_image(file, 1, "it"))), expected)


def test_other_modes_become_the_models() -> None:
    rgba = image_of("RGBA")
    assert decoded_image(encoded(rgba), 3, "it").tobytes() == rgba.convert("RGB").tobytes()
    assert decoded_image(encoded(rgba), 4, "it").tobytes() == rgba.tobytes()
    palette = image_of().quantize(8)
    assert decoded_image(encoded(palette), 3, "it").tobytes() == palette.convert("RGB").tobytes()
    assert decoded_image(encoded(image_of("L")), 3, "it").getbands() == ("R", "G", "B")


def test_an_image_taken_sideways_is_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned by a quarter
    buffer = BytesIO()
    image_of("L", 12, 8).save(buffer, "PNG", exif=exif)
    found = decoded_image(buffer.getvalue(), 1, "it")
    assert (found.width, found.height) == (8, 12)
    assert found.tobytes() == image_of("L", 12, 8).transpose(Image.Transpose.ROTATE_270).tobytes()


def test_without_a_processor_numbers_are_from_minus_one_to_one() -> None:
    preparer = ImagePreparer(usual_preparation(1, (3, 2)))
    pixels = np.array([[0, 255], [51, 102], [204, 153]], dtype=np.uint8)
    found = preparer.numbers(preparer.place(Image.fromarray(pixels)))
    assert np.allclose(found, [[[-1, 1], [-0.6, -0.2], [0.6, 0.2]]], atol=1e-6)
    scaled = preparer.place(image_of("L", 20, 20))
    assert (scaled.height, scaled.width) == (3, 2)


@pytest.mark.parametrize(
    ("file", "told"),
    [
        (b"not an image", r"x\.png is no image that can be read \(UnidentifiedImageError"),
        (b"", r"x\.png is no image that can be read"),
        (encoded(image_of(width=40, height=40))[:900], r"x\.png is no image that can be read \(OSError"),
        (encoded(image_of(), "ICO"), r"x\.png is no image that can be read"),
        (
            encoded(Image.fromarray(np.zeros((3, 3), np.uint16))),
            r"x\.png has pixels of more than 8 bits \(I;16",
        ),
    ],
    ids=["text", "empty", "cut off", "another format", "16 bits"],
)
def test_what_is_no_image_is_named(file: bytes, told: str) -> None:
    with pytest.raises(JobError, match=told):
        decoded_image(file, 3, "x.png")


def test_colors_that_do_not_become_gray_are_refused() -> None:
    lab = encoded(Image.new("LAB", (3, 3)), "TIFF")
    assert decoded_image(lab, 3, "x.tif").mode == "RGB"
    with pytest.raises(JobError, match=r"x\.tif has pixels of the mode LAB, .* turn into L: save it as RGB"):
        decoded_image(lab, 1, "x.tif")


def test_channels_that_no_image_has_are_refused() -> None:
    with pytest.raises(JobError, match="takes images of 2 channels, and images have 1, 3 or 4"):
        decoded_image(encoded(image_of()), 2, "x.png")
