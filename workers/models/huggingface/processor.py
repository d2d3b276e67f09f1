"""Preparation of images as an image processor of transformers has it, from its preprocessor_config.json.

Without transformers: its own processors want torchvision, or are imported with all that they need.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.models.image_preparation import ImagePreparation, Pixels, usual_preparation
from workers.protocol.errors import JobError

FILE, COMBINED = "preprocessor_config.json", "processor_config.json"
"""Names of the file that tells of images alone, and of the one that tells of other things too."""

_HALF = (0.5, 0.5, 0.5)
_OF_CLIP = {
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
    "size": {"shortest_edge": 224},
    "crop_size": {"height": 224, "width": 224},
    "do_center_crop": True,
    "resample": 3,
}
_KINDS: Mapping[str, Mapping[str, Any]] = {
    "ViT": {"size": {"height": 224, "width": 224}, "resample": 2},
    "ConvNext": {"size": {"shortest_edge": 384}, "resample": 3, "crop_pct": 224 / 256},
    "DeiT": {
        "size": {"height": 256, "width": 256},
        "crop_size": {"height": 224, "width": 224},
        "do_center_crop": True,
        "resample": 3,
    },
    "Bit": _OF_CLIP,
    "CLIP": _OF_CLIP,
}
"""Kind of processor -> what a file that does not say it means. Kinds that do no more than is done here."""
_USUAL: Mapping[str, Any] = {
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": _HALF,
    "image_std": _HALF,
}
_BY_SHORTER_SIDE = ("ConvNext", "Bit", "CLIP")
"""Kinds for which a size of one number is that of the shorter side."""
_DONE = ("do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb")
_NO_CROP = 384
"""Side from which on ConvNext's processor scales to a square and crops nothing."""


def read_processor(folder: Path) -> dict[str, Any] | None:
    """The fields of the image processor in a model's folder; None: there is none.

    Raises:
        JobError: its file cannot be read.
    """
    for name in (FILE, COMBINED):
        path = folder / name
        if not path.is_file():
            continue
        try:
            fields = json.loads(path.read_text())
            if name == COMBINED:
                fields = fields.get("image_processor")
        except (OSError, ValueError, AttributeError) as error:
            raise JobError(f"{path} cannot be read ({error}): fetch it again") from error
        if isinstance(fields, dict):
            return fields
    return None


def preparation_of(fields: Mapping[str, Any] | None, channels: int, size: Pixels) -> ImagePreparation:
    """The preparation that a processor with these fields does; without fields the usual one.

    Args:
        fields: of a preprocessor_config.json.
        channels: of the model's input.
        size: of the model's images, for a processor that does not change theirs.

    Raises:
        JobError: it does something that is not done here, or its fields do not fit.
    """
    if fields is None:
        return usual_preparation(channels, size)
    kind = _kind(fields)
    given = {**_USUAL, **_KINDS[kind], **{name: value for name, value in fields.items() if value is not None}}
    for name, value in given.items():
        if name.startswith("do_") and name not in _DONE and value:
            raise JobError(
                f"the model's {FILE} has {name}, which is not done here: set it to false (model.processor)"
            )
    try:
        return _preparation(kind, given, channels, size)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise JobError(
            f"the model's {FILE} does not fit a processor of {kind} ({type(error).__name__}: {error}): fetch it again,"
            " or set model.processor"
        ) from error


def _kind(fields: Mapping[str, Any]) -> str:
    """Raises JobError where the kind of processor is not known."""
    name = fields.get("image_processor_type") or fields.get("feature_extractor_type")
    if name is None:
        return "ConvNext" if "crop_pct" in fields else "ViT"
    for kind in _KINDS:
        if str(name).lower().startswith((f"{kind}ImageProcessor".lower(), f"{kind}FeatureExtractor".lower())):
            return kind
    raise JobError(
        f"the model's images are prepared by {name}, which is not one of {', '.join(_KINDS)}: write what it does with"
        " the fields of one of these (model.processor), or write a source"
    )


def _preparation(kind: str, given: Mapping[str, Any], channels: int, size: Pixels) -> ImagePreparation:
    resize: Pixels | int | None = None
    crops: list[Pixels] = []
    if given["do_resize"]:
        resize = _pixels(given["size"], square=kind not in _BY_SHORTER_SIDE)
        if kind == "ConvNext":
            if not isinstance(resize, int):
                raise ValueError(f"size = {given['size']} has no shortest_edge")
            edge = resize
            if edge < _NO_CROP:
                resize = int(edge / given["crop_pct"])
                crops.append((edge, edge))
            else:
                resize = (edge, edge)
    if given.get("do_center_crop"):
        crop = _pixels(given["crop_size"], square=True)
        if isinstance(crop, int):
            raise ValueError(f"crop_size = {given['crop_size']} has no height and width")
        crops.append(crop)
    if crops:
        size = crops[-1]
    elif isinstance(resize, int):
        raise ValueError(f"size = {given['size']} without a crop makes images of many sizes")
    elif resize is not None:
        size = resize
    normalize = given["do_normalize"]
    return ImagePreparation(
        channels=channels,
        size=size,
        resize=resize,
        crops=tuple(crops),
        resample=_resample(given["resample"]),
        factor=float(given["rescale_factor"]) if given["do_rescale"] else None,
        mean=_per_channel(given["image_mean"], channels) if normalize else None,
        std=_per_channel(given["image_std"], channels) if normalize else None,
    )


def _pixels(given: Any, *, square: bool) -> Pixels | int:
    if isinstance(given, int):
        return (given, given) if square else given
    if isinstance(given, (list, tuple)):
        height, width = given
        return int(height), int(width)
    if given.keys() == {"shortest_edge"}:
        return int(given["shortest_edge"])
    if given.keys() != {"height", "width"}:
        raise ValueError(f"a size has height and width, or shortest_edge, not {', '.join(given)}")
    return int(given["height"]), int(given["width"])


def _resample(given: Any) -> int:
    if given not in range(6):
        raise ValueError(f"resample = {given} is no filter of Pillow, 0 to 5")
    return int(given)


def _per_channel(given: Any, channels: int) -> tuple[float, ...]:
    numbers = tuple(map(float, given)) if isinstance(given, (list, tuple)) else (float(given),) * channels
    if len(numbers) != channels:
        raise ValueError(
            f"{len(numbers)} numbers for mean or std, and the model takes images of {channels} channels"
        )
    return numbers
