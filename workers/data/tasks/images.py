"""`images`: a class, or a number, for an image."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workers.config import AugmentConfig
from workers.data.dataset import Batch
from workers.data.images.augmentation import Augmentation
from workers.data.images.decoding import decoded_image
from workers.data.images.preparing import ImagePreparer
from workers.data.tasks.task import Columns, EncodedRow, label_number
from workers.models.image_preparation import ImagePreparation
from workers.protocol.errors import JobError

IMAGE, LABEL = "image", "label"
BYTE_VALUES = 256
"""Values of the tokens of a row, which are the bytes of an image file."""
_NO_FLAGS = np.zeros(0, dtype=np.uint8)


@dataclass(frozen=True, kw_only=True)
class ImageSetting:
    """Facts of model and data that the task needs."""

    preparation: ImagePreparation
    classes: int
    """Number of classes; 1: a regression."""
    labels: Mapping[str, int] = field(default_factory=dict)
    """Name of a class -> its number."""
    augment: AugmentConfig | None = None
    """Random changes; None: images are prepared as they are."""


class Images:
    """Rows that are image files, byte for byte; an image is decoded and prepared each time that it is read."""

    roles: tuple[str, ...] = (IMAGE, LABEL)
    optional: tuple[str, ...] = ()

    def __init__(self, setting: ImageSetting) -> None:
        self._setting, self._preparer = setting, ImagePreparer(setting.preparation)
        augment = setting.augment
        self._augmentation = None if augment is None else Augmentation(augment, self._preparer)
        self.draws = augment is not None

    def rows(self, columns: Columns, where: str, first: int) -> Iterator[EncodedRow]:
        """Rows of images in the form of `datasets.Image` (bytes and path), as bytes, or as paths below the folder of
        their table. Each is decoded, so that training meets none that cannot be."""
        setting = self._setting
        root = Path(where) if Path(where).is_dir() else Path(where).parent
        for number, (value, label) in enumerate(zip(columns[IMAGE], columns[LABEL], strict=True)):
            encoded, place = _encoded(value, root, f"{where}, row {first + number}")
            image = decoded_image(encoded, setting.preparation.channels, place)
            self._preparer.check(image, place)
            found = label_number(label, setting.classes, setting.labels, place)
            yield EncodedRow(np.frombuffer(encoded, dtype=np.uint8), _NO_FLAGS, found)

    def batch(self, rows: Sequence[EncodedRow], draws: Sequence[int]) -> Batch:
        """inputs: float32[B, C, H, W]; targets: classes int64[B], or numbers float32[B]."""
        numbers = [self._numbers(row, draw) for row, draw in zip(rows, draws, strict=True)]
        return Batch((torch.from_numpy(np.stack(numbers)),), self.targets(rows))

    def targets(self, rows: Sequence[EncodedRow]) -> tuple[Tensor, ...]:
        """The targets of `batch`."""
        labels = torch.tensor([row.label for row in rows], dtype=torch.float64)
        return (labels.float() if self._setting.classes == 1 else labels.long(),)

    def _numbers(self, row: EncodedRow, draw: int) -> np.ndarray:
        image = decoded_image(row.tokens.tobytes(), self._setting.preparation.channels, "a row")
        placed = (
            self._preparer.place(image)
            if self._augmentation is None
            else self._augmentation.changed(image, draw)
        )
        return self._preparer.numbers(placed)


def _encoded(value: Any, root: Path, where: str) -> tuple[bytes, str]:
    """The bytes of an image file, and where they lie.

    Raises:
        JobError: `value` is no image, or its file cannot be read.
    """
    path = value
    if isinstance(value, Mapping):
        path = value.get("path")
        value = value.get("bytes")
        if value is None:
            value = path
    if isinstance(value, bytes) and value:
        return value, where
    if not isinstance(value, str):
        raise JobError(
            f"{where}: its image is {'empty' if not value else f'of type {type(value).__name__}'}: give bytes, a path,"
            " or both as datasets.Image has them; or name another column (data.columns)"
        )
    # A table that somebody else wrote may name any file.
    inside = os.path.normpath(value)
    if os.path.isabs(inside) or Path(inside).parts[:1] == (os.pardir,):
        raise JobError(
            f"{where}: its image {value} lies outside of {root}: give a path below it, or the bytes"
        )
    try:
        return (root / inside).read_bytes(), str(root / inside)
    except (OSError, ValueError) as error:  # ValueError: no file can have that name
        reason = error.strerror if isinstance(error, OSError) else error
        raise JobError(f"{where}: its image {str(root / inside)!r} cannot be read: {reason}") from error
