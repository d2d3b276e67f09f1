"""Samples of text: windows of tokens that do not overlap. Knows nothing of where the tokens came from."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.data.dataset import Batch
from workers.data.split import held_out
from workers.protocol.errors import JobError


class TokenWindows:
    """Sample i reads context + 1 tokens, from token i * context on.

    All but the last of them are its inputs, all but the first its targets: every token but the very first of
    the text is a target once.
    """

    def __init__(self, tokens: NDArray[Any], context: int, validation_fraction: float) -> None:
        """`tokens`: any unsigned integers [tokens]; a memory map is read only where samples are.

        Raises:
            JobError: fewer tokens than one sample needs, or too few samples to hold any out.
        """
        samples = (len(tokens) - 1) // context
        if samples < 1:
            raise JobError(
                f"the text has {len(tokens)} tokens, and one sample needs model.context + 1 = {context + 1}:"
                f" add text, or set model.context to at most {max(len(tokens) - 1, 1)}"
            )
        self._tokens = tokens
        self._context = context
        self._validation_samples = held_out(samples, validation_fraction)
        self._train_samples = samples - self._validation_samples

    @property
    def train_samples(self) -> int:
        return self._train_samples

    @property
    def validation_samples(self) -> int:
        return self._validation_samples

    def train(self, indices: list[int]) -> Batch:
        """inputs and targets: int64[B, context]."""
        return self._batch(np.asarray(indices))

    def validation(self, indices: list[int]) -> Batch:
        """inputs and targets: int64[B, context]."""
        return self._batch(np.asarray(indices) + self._train_samples)

    def _batch(self, samples: NDArray[Any]) -> Batch:
        starts = samples[:, None] * self._context
        columns = np.arange(self._context)
        return Batch(inputs=(self._gather(starts + columns),), targets=(self._gather(starts + columns + 1),))

    def _gather(self, positions: NDArray[Any]) -> Tensor:
        # Gathered separately: a slice of a common copy would not be a fresh allocation, nor aligned for one row.
        return torch.from_numpy(self._tokens[positions].astype(np.int64))
