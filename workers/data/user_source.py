"""Makes an `OpenData` of what a user's data source returned, or says why that cannot be.

Accepted: a `Dataset` whose batches are `Batch` or `(inputs, targets)`, or PyTorch's map style, `__len__` and
`__getitem__` with samples `(input, target)`. Knows nothing of how the source was found.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from workers.data.dataset import Batch, Dataset, OpenData, takes_draws
from workers.data.split import held_out
from workers.process.user_code import what_it_did, where
from workers.protocol.errors import JobError
from workers.reproducibility import rng

_MEMBERS = ("train_samples", "validation_samples", "train", "validation")
_FIRST = rng.key(0, "first sample")
_MAP_STYLE = ("__len__", "__getitem__")


def as_open_data(returned: Any, validation_fraction: float, origin: str) -> OpenData:
    """The data that `returned` amounts to; reads its first sample.

    `validation_fraction` is the share of a map-style data set that is held out, from its end. `origin` opens every
    message, e.g. "data.source = 'my_data:open'".

    Raises:
        JobError: it is none of what a source may return, it has no training samples, or its first sample is wrong.
    """
    opened = returned if isinstance(returned, OpenData) else OpenData(dataset=returned)
    given: Any = opened.dataset
    missing = [member for member in _MEMBERS if not hasattr(given, member)]
    if not missing:
        dataset: Dataset = (_DrawnBatches if takes_draws(given) else _Batches)(given, origin)
    elif all(hasattr(given, member) for member in _MAP_STYLE) and not isinstance(given, (tuple, dict, str)):
        dataset = _Batches(_Samples(given, validation_fraction, origin), origin)
    else:
        raise JobError(
            f"{origin} returned a {type(given).__name__} without {', '.join(missing)}: return an object with the"
            " members of workers.data.dataset.Dataset, or a PyTorch data set with __len__ and __getitem__"
        )
    if dataset.train_samples < 1:
        raise JobError(
            f"{origin} returned a data set with {dataset.train_samples} training samples: it needs at least one"
        )
    _read_first(dataset, origin)
    return replace(opened, dataset=dataset)


class _Batches:
    """A data set whose batches may be `(inputs, targets)`; each comes out as a checked `Batch`."""

    def __init__(self, given: Any, origin: str) -> None:
        self._given = given
        self._origin = origin

    @property
    def train_samples(self) -> int:
        return self._given.train_samples

    @property
    def validation_samples(self) -> int:
        return self._given.validation_samples

    def train(self, indices: list[int]) -> Batch:
        return _as_batch(self._given.train(indices), len(indices), f"{self._origin}: train")

    def validation(self, indices: list[int]) -> Batch:
        return _as_batch(self._given.validation(indices), len(indices), f"{self._origin}: validation")


class _DrawnBatches(_Batches):
    """One whose training samples take a key each."""

    def train(self, indices: list[int], draws: list[int] | None = None) -> Batch:
        draws = [_FIRST] * len(indices) if draws is None else draws
        return _as_batch(self._given.train(indices, draws), len(indices), f"{self._origin}: train")


class _Samples:
    """A map-style data set of `(input, target)` samples, collated as PyTorch's `DataLoader` does."""

    def __init__(self, samples: Any, validation_fraction: float, origin: str) -> None:
        self._samples = samples
        self._origin = origin
        count = len(samples)
        self.validation_samples = held_out(count, validation_fraction) if count else 0
        self.train_samples = count - self.validation_samples

    def train(self, indices: list[int]) -> tuple[Any, Any]:
        return self._collated(indices)

    def validation(self, indices: list[int]) -> tuple[Any, Any]:
        return self._collated([self.train_samples + index for index in indices])

    def _collated(self, indices: list[int]) -> tuple[Any, Any]:
        samples = [self._samples[index] for index in indices]
        for index, sample in zip(indices, samples, strict=True):
            if not isinstance(sample, (tuple, list)) or len(sample) != 2:
                raise JobError(
                    f"{self._origin}: sample {index} is {_described(sample)}: return a pair (input, target)"
                )
        try:
            inputs, targets = default_collate(samples)
        except (RuntimeError, TypeError) as error:
            raise JobError(
                f"{self._origin}: samples {', '.join(map(str, indices))} do not stack into a batch: {error}"
            ) from error
        return inputs, targets


def _read_first(dataset: Dataset, origin: str) -> None:
    """Find what is wrong with the samples here, where a mistake costs no cluster."""
    read = []
    for _ in range(2):
        try:
            with rng.keyed(_FIRST):
                batch = dataset.train([0])
        except JobError:
            raise
        except (Exception, SystemExit) as error:
            raise JobError(
                f"{origin}: the first training sample {what_it_did(error)}{where(error)}"
            ) from error
        read.append([tensor.clone() for tensor in (*batch.inputs, *batch.targets)])
    first, again = read
    if len(first) != len(again) or not all(map(_same, first, again)):
        raise JobError(
            f"{origin}: the first training sample is another one each time that it is read, so ranks would read"
            " different ones: draw from the default generators of torch, random or numpy, whose draws are keyed, or"
            " from one that you seed by the index"
        )


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _as_batch(returned: Any, size: int, origin: str) -> Batch:
    """Raises JobError where `returned` is no batch of `size` samples."""
    if isinstance(returned, Batch):
        inputs, targets = returned.inputs, returned.targets
    elif isinstance(returned, (tuple, list)) and len(returned) == 2:
        inputs, targets = returned
    else:
        raise JobError(
            f"{origin} returned {_described(returned)}: return (inputs, targets) or a workers.data.dataset.Batch"
        )
    return Batch(
        inputs=_tensors(inputs, size, f"{origin}: inputs"),
        targets=_tensors(targets, size, f"{origin}: targets"),
    )


def _tensors(value: Any, size: int, origin: str) -> tuple[Tensor, ...]:
    tensors = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise JobError(f"{origin} are {_described(value)}: give a tensor, or a tuple of tensors")
        if tensor.shape[:1] != (size,):
            raise JobError(
                f"{origin} have shape {list(tensor.shape)} for a batch of {size}: the first dimension counts samples"
            )
    # Memory of their own: a source may fill the same tensors again for the next microbatch.
    return tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors)


def _described(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {', '.join(type(item).__name__ for item in value[:4])}"
    return "None" if value is None else f"a {type(value).__name__}"
