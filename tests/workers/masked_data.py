"""Text of which a loss is asked for some tokens only, and images' classes by the dozen: data sources for tests."""

import torch
from torch import Tensor

from workers.data.dataset import Batch
from workers.models.loss import IGNORED

VOCABULARY, LENGTH = 13, 6


class Masked:
    """Tokens int64[B, LENGTH] that count up, each sample with a number of targets of its own: none, one, or up to all.

    Args:
        held_out: validation samples.
        empty: whether no sample has a target.
    """

    train_samples = 48

    def __init__(self, held_out: int = 11, empty: bool = False) -> None:
        self.validation_samples = held_out
        generator = torch.Generator().manual_seed(11)
        total = self.train_samples + held_out
        begins = torch.randint(0, VOCABULARY, (total, 1), generator=generator)
        self._tokens = (begins + torch.arange(LENGTH + 1)) % VOCABULARY
        asked = torch.randint(0, LENGTH + 1, (total, 1), generator=generator)
        asked[::7] = 0
        if empty:
            asked[:] = 0
        self._asked = torch.arange(LENGTH) < asked

    def train(self, indices: list[int]) -> Batch:
        return self._batch(indices)

    def validation(self, indices: list[int]) -> Batch:
        READ.extend(indices)
        return self._batch([self.train_samples + index for index in indices])

    def _batch(self, indices: list[int]) -> Batch:
        tokens = self._tokens[indices]
        targets = torch.where(self._asked[indices], tokens[:, 1:], IGNORED)
        return Batch((tokens[:, :-1].contiguous(),), (targets,))


READ: list[int] = []
"""Held-out samples that were read, by all ranks of this process."""


def whole(data: Masked, indices: list[int]) -> tuple[Tensor, Tensor]:
    """Inputs and targets of all of `indices`, as one microbatch."""
    batch = data._batch(indices)
    return batch.inputs[0], batch.targets[0]
