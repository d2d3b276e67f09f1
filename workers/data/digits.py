"""`digits`: scikit-learn's 1,797 images of handwritten digits, 8 x 8 pixels, as a `Dataset`.

Imports scikit-learn, which is slow, only when it is opened.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from workers.data.dataset import Batch
from workers.data.split import held_out
from workers.models.families.family import ImageModel, ModelFamily
from workers.protocol.errors import JobError

_SIZES = {"image_size": 8, "channels": 1, "classes": 10}
_BRIGHTEST = 16.0


class Digits:
    """Images with their labels, in scikit-learn's order."""

    def __init__(self, images: Tensor, labels: Tensor, validation_fraction: float) -> None:
        """images: float32[N, 1, 8, 8] in [0, 1], labels: int64[N].

        Raises:
            JobError: too few samples to hold any out.
        """
        self._images = images
        self._labels = labels
        self._validation_samples = held_out(len(labels), validation_fraction)

    @property
    def train_samples(self) -> int:
        return len(self._labels) - self._validation_samples

    @property
    def validation_samples(self) -> int:
        return self._validation_samples

    def train(self, indices: list[int]) -> Batch:
        """inputs: float32[B, 1, 8, 8], targets: int64[B]."""
        return self._batch(torch.tensor(indices))

    def validation(self, indices: list[int]) -> Batch:
        """inputs: float32[B, 1, 8, 8], targets: int64[B]."""
        return self._batch(torch.tensor(indices) + self.train_samples)

    def _batch(self, samples: Tensor) -> Batch:
        return Batch(
            inputs=(self._images.index_select(0, samples),), targets=(self._labels.index_select(0, samples),)
        )


def open_digits(model: ModelFamily, validation_fraction: float) -> Digits:
    """The images, for a model of their size or any factory.

    Raises:
        JobError: the model is of another size, or too few samples are held out.
    """
    if isinstance(model, ImageModel):
        for setting, size in _SIZES.items():
            configured = getattr(model, setting)
            if configured != size:
                raise JobError(
                    f"model.{setting} = {configured} does not fit the data: digits has {setting} = {size};"
                    f" set model.{setting} to {size}"
                )
    from sklearn.datasets import load_digits

    pixels, labels = map(np.asarray, load_digits(return_X_y=True))
    images = torch.from_numpy((pixels / _BRIGHTEST).astype(np.float32)).view(-1, 1, 8, 8)
    return Digits(images, torch.from_numpy(labels.astype(np.int64)), validation_fraction)
