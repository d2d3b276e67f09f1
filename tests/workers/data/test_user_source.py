"""What a user's data source may return, and the errors for anything else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, TensorDataset

from workers.data.dataset import Batch, OpenData
from workers.data.user_source import as_open_data
from workers.protocol.errors import JobError
from workers.reproducibility import rng

ORIGIN = "data.source = 'mine:open'"


class Batches:
    """A source whose batches are whatever `make` returns."""

    train_samples = 6
    validation_samples = 2

    def __init__(self, make: Any) -> None:
        self._make = make

    def train(self, indices: list[int]) -> Any:
        return self._make(torch.tensor(indices))

    def validation(self, indices: list[int]) -> Any:
        return self._make(torch.tensor(indices) + self.train_samples)


class Squares(TorchDataset[Any]):
    """A map-style PyTorch data set."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((2,), float(index)), index * index


def opened(returned: Any, fraction: float = 0.0) -> OpenData:
    return as_open_data(returned, fraction, ORIGIN)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: Batch((x,), (x * x,)),
        lambda x: (x, x * x),
        lambda x: [(x,), [x * x]],
    ],
)
def test_pairs_are_taken_beside_batches(make: Any) -> None:
    data = opened(Batches(make)).dataset
    assert (data.train_samples, data.validation_samples) == (6, 2)
    batch, held_out = data.train([3, 1]), data.validation([1])
    assert isinstance(batch, Batch)
    assert [tensor.tolist() for tensor in (*batch.inputs, *batch.targets)] == [[3, 1], [9, 1]]
    assert held_out.inputs[0].tolist() == [7]


def test_a_map_style_data_set_is_collated_and_its_end_held_out() -> None:
    data = opened(Squares(10), fraction=0.2).dataset
    assert (data.train_samples, data.validation_samples) == (8, 2)
    batch = data.train([7, 0, 2])
    assert batch.inputs[0].tolist() == [[7.0, 7.0], [0.0, 0.0], [2.0, 2.0]]
    assert batch.targets[0].tolist() == [49, 0, 4]
    assert data.validation([1]).targets[0].tolist() == [81]
    tensors = opened(TensorDataset(torch.arange(6.0).view(3, 2), torch.arange(3))).dataset
    assert tensors.train([2]).inputs[0].tolist() == [[4.0, 5.0]]


def test_open_data_may_hold_a_map_style_data_set() -> None:
    data = opened(OpenData(dataset=Squares(3), vocabulary=7))  # pyright: ignore[reportArgumentType]
    assert (data.vocabulary, data.dataset.train_samples) == (7, 3)


class Endless(IterableDataset[Any]):
    """A data set without samples by index."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class Raising(Squares):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        raise OSError("disk on fire")


class Ragged(Squares):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(index + 1), index


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (Batches(lambda x: x), r"train returned a Tensor: return \(inputs, targets\) or"),
        (Batches(lambda x: (x, x, x)), r"train returned a tuple of Tensor, Tensor, Tensor: return"),
        (Batches(lambda x: None), r"train returned None: return"),
        (Batches(lambda x: (x.tolist(), x)), r"train: inputs are a list of int: give a tensor, or a tuple"),
        (Batches(lambda x: (x, {"y": x})), r"train: targets are a dict: give a tensor, or a tuple"),
        (
            Batches(lambda x: (x, x.sum())),
            r"targets have shape \[\] for a batch of 1: the first dimension counts",
        ),
        ([{"x": 1}], r"sample 0 is a dict: return a pair \(input, target\)"),
        (Raising(2), r"the first training sample raised OSError: disk on fire"),
        (
            Endless(),
            r"a Endless without train_samples, .*, or a PyTorch data set with __len__ and __getitem__",
        ),
        ((Squares(2), Squares(2)), r"returned a tuple without train_samples"),
        (Squares(0), r"returned a data set with 0 training samples"),
    ],
)
def test_what_is_wrong_is_named(returned: Any, message: str) -> None:
    with pytest.raises(JobError, match=rf"^data.source = 'mine:open'.*{message}"):
        opened(returned)


def test_samples_of_unequal_size_are_named() -> None:
    data = opened(Ragged(4)).dataset
    with pytest.raises(JobError, match=r"samples 0, 2 do not stack into a batch: stack expects"):
        data.train([0, 2])


class Augmented(Squares):
    """Adds noise that `draw` makes."""

    def __init__(self, draw: Any) -> None:
        super().__init__(8)
        self._draw = draw

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        sample, target = super().__getitem__(index)
        return sample + self._draw(), target


@pytest.mark.parametrize("draw", [random.random, lambda: float(np.random.rand()), lambda: torch.rand(2)])
def test_augmentation_with_the_default_generators_is_taken(draw: Any) -> None:
    dataset = opened(Augmented(draw)).dataset
    first, again, other = (_keyed(dataset, key) for key in (1, 1, 2))
    assert first.equal(again)
    assert not first.equal(other)


def _keyed(dataset: Any, key: int) -> Tensor:
    with rng.keyed(key):
        return dataset.train([0]).inputs[0]


def test_a_source_that_reads_another_sample_each_time_is_refused() -> None:
    generator = np.random.default_rng(3)
    with pytest.raises(JobError, match=r"another one each time that it is read.*default generators"):
        opened(Augmented(lambda: float(generator.random())))
