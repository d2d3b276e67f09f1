"""Random batches for models of transformers, as a source of `[data]`."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.data.dataset import Batch


class RandomBatches:
    """Tokens with the mask that belongs to them, or images, with random targets; each sample is a function of its
    number.

    Args:
        task: one of `workers.models.huggingface.architecture.Task`.
        vocabulary: of tokens; 0: the samples are images.
        size: tokens per sample, or the side of an image in pixels.
        classes: of images or texts.
    """

    train_samples = 4096
    validation_samples = 0

    def __init__(self, task: str, size: int, vocabulary: int = 0, classes: int = 10) -> None:
        self._task, self._size, self._vocabulary, self._classes = task, size, vocabulary, classes

    def train(self, indices: list[int]) -> Batch:
        samples = [self._sample(index) for index in indices]
        inputs, targets = (
            tuple(map(torch.stack, zip(*each, strict=True))) for each in zip(*samples, strict=True)
        )
        if self._task == "sequence-classification":
            inputs = (*inputs, torch.ones_like(inputs[0]))
        return Batch(inputs=inputs, targets=targets)

    def validation(self, indices: list[int]) -> Batch:
        return self.train(indices)

    def _sample(self, index: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        draws = torch.Generator().manual_seed(index)
        if not self._vocabulary:
            image = torch.randn(1, self._size, self._size, generator=draws)
            return (image,), (torch.randint(self._classes, (), generator=draws),)
        tokens = torch.randint(1, self._vocabulary, (self._size + 1,), generator=draws)
        target = tokens[1:] if self._task == "language" else tokens[0] % self._classes
        return (tokens[:-1],), (target,)
