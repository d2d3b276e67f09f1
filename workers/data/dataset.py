"""Interface of training data: a pure function from (seed, sample index) to a batch."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import Protocol

from torch import Tensor

from planner.course import Course
from workers.data.buckets import Buckets
from workers.data.mixture import Mixture
from workers.metrics.measure import Measure


@dataclass(frozen=True)
class Batch:
    """One microbatch."""

    inputs: tuple[Tensor, ...]
    """Inputs of the first layer, each [B, ...]."""
    targets: tuple[Tensor, ...]
    """Arguments of the loss after the last layer's outputs, each [B, ...]."""
    through: int = 0
    """Layers of the model that the inputs have gone through already, where these were kept."""
    samples: tuple[int, ...] = ()
    """The samples, where what layers make of them may be kept."""


class Dataset(Protocol):
    """Samples by index.

    Which samples a microbatch holds is decided by `workers/data/sampling.py`, not here.
    """

    @property
    def train_samples(self) -> int:
        """Number of samples to train on."""
        ...

    @property
    def validation_samples(self) -> int:
        """Number of held-out samples."""
        ...

    def train(self, indices: list[int]) -> Batch:
        """The training samples `indices`, stacked in that order; fresh, contiguous CPU tensors.

        It may take a second argument, `draws: list[int]`, a key for each of them to draw with, from the seed, the epoch
        and the sample: so chance, too, is a pure function.

        Internal, and not for data sets of users: `TaskRows` also has `train_targets`, with the same arguments, which
        may leave out inputs that take long to make. Ranks that need the targets alone call that.
        """
        ...

    def validation(self, indices: list[int]) -> Batch:
        """The held-out samples `indices`, likewise."""
        ...


def takes_draws(dataset: Dataset) -> bool:
    """Whether its `train` takes a key per sample."""
    try:
        return "draws" in signature(dataset.train).parameters
    except (TypeError, ValueError):  # it is no function, or one that tells no arguments
        return False


def draws_anew(dataset: Dataset) -> bool:
    """Whether what it makes of a sample differs from epoch to epoch. `TaskRows` says so; of others it is assumed, if
    they take keys to draw with."""
    return getattr(dataset, "draws_anew", takes_draws(dataset))


def stream_of(dataset: Dataset, buckets: int, course: Course) -> int | Mixture | Buckets:
    """The samples that training takes in turn, as `train_places` has them: their number, the tables that `dataset`
    mixes, its attribute `mixture`, which those of users do not have, or `data.buckets` parts of the samples."""
    if buckets > 1:
        return Buckets(dataset.train_samples, buckets, course)
    mixture = getattr(dataset, "mixture", None)
    return mixture if isinstance(mixture, Mixture) else dataset.train_samples


class Tokenizer(Protocol):
    """Text to tokens and back."""

    @property
    def vocabulary(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...


@dataclass(frozen=True, kw_only=True)
class OpenData:
    """A data set and what the model must know of it.

    A source given by import path may return one, or a bare `Dataset`.
    """

    dataset: Dataset
    tokenizer: Tokenizer | None = None
    """None where samples are not text."""
    vocabulary: int | None = None
    """Tokens the tokenizer knows; None where there are none."""
    tokens_per_sample: int = 0
    """Tokens a sample trains on; 0 where there are none."""
    sha256: str | None = None
    """SHA-256 of all tokens; None where samples are not text of the built-in sources."""
    measure: Measure | None = None
    """Metrics that need the samples themselves, in place of the model's; None: there are none."""
