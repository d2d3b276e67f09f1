"""Interface of a task, and the rows that it makes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.data.dataset import Batch
from workers.data.tokenizer import TextTokenizer
from workers.metrics.measure import Measure
from workers.protocol.errors import JobError

Columns = Mapping[str, Sequence[Any]]
"""Role -> values of some consecutive rows of a table."""
TooLong = Literal["error", "cut", "drop"]

ASKED, SECOND, SPECIAL = 1, 2, 4
"""Flags of a token: the loss asks for it; it belongs to the second text of a pair; the tokenizer has added it."""


@dataclass(frozen=True)
class EncodedRow:
    """A row for training, as it is kept: its tokens [T], a flag of each, uint8 [T], and its label."""

    tokens: NDArray[Any]
    """Integers of any type: of those that are read back, the smallest unsigned one that fits the vocabulary."""
    flags: NDArray[np.uint8]
    label: float = 0.0
    note: bytes = b""
    """Text that its task's metrics need."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Facts of model and data that a task needs."""

    tokenizer: TextTokenizer
    length: int
    """Tokens per sample, T."""
    too_long: TooLong = "error"
    classes: int = 0
    """Number of classes; 1: a regression."""
    labels: Mapping[str, int] = field(default_factory=dict)
    """Name of a class -> its number."""
    pack: bool = False
    """Whether a sample holds several rows, each of them whole."""
    mask_fraction: float = 0.15
    """Share of the tokens that `masked-language` asks for."""
    overlap: int = 0
    """Tokens that windows of a context share, in `question-answering`."""


class Task(Protocol):
    """A task, made of a `Setting`."""

    roles: tuple[str, ...]
    """Columns that it needs."""
    optional: tuple[str, ...]
    """Columns that it takes if they are there."""

    @property
    def draws(self) -> bool:
        """Whether it draws as it makes a microbatch."""
        ...

    def rows(self, columns: Columns, where: str, first: int) -> Iterator[EncodedRow]:
        """Rows for training of consecutive rows of a table; one may give several, or none.

        Args:
            where: their file, for messages.
            first: number of the first of them in that file, from 1.

        Raises:
            JobError: a row is not what the task takes.
        """
        ...

    def batch(self, rows: Sequence[EncodedRow], draws: Sequence[int]) -> Batch:
        """The microbatch of `rows`.

        Args:
            draws: a key of each to draw with, if the task draws.
        """
        ...


@runtime_checkable
class JudgedTogether(Protocol):
    """A task that makes several rows for training of one of a table, which have one number in its metrics."""

    def begins(self, row: EncodedRow) -> bool:
        """Whether `row` is the first of those."""
        ...

    def measure(self, held_out: Sequence[EncodedRow]) -> Measure:
        """The metrics, which need the held-out rows themselves."""
        ...


@runtime_checkable
class HasTargetsAlone(Protocol):
    """A task whose inputs take long to make, and whose targets are known without them."""

    def targets(self, rows: Sequence[EncodedRow]) -> tuple[Tensor, ...]:
        """The targets of the microbatch of `rows`."""
        ...


def text_of(value: Any, role: str, where: str) -> str:
    """`value` of a row, which must be text.

    Raises:
        JobError: it is not.
    """
    if not isinstance(value, str):
        what = "empty" if value is None else f"of type {type(value).__name__}, not text"
        raise JobError(
            f"{where}: its {role} is {what}: name another column (data.columns), or leave the row out"
        )
    return value


def label_number(value: Any, classes: int, labels: Mapping[str, int], where: str) -> float:
    """The class of a row, or with one class the number that is asked for.

    Args:
        value: its label.
        classes: number of classes.
        labels: name of a class -> its number.

    Raises:
        JobError: `value` is none.
    """
    if classes == 1:
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise JobError(
                f"{where}: its label is {value!r}: a regression (model.classes = 1) needs a number"
            )
        return float(value)
    found = labels.get(value) if isinstance(value, str) else value
    if isinstance(value, str) and found is None:
        known = f"are called {', '.join(labels)}" if labels else "have no names"
        raise JobError(
            f"{where}: its label is {value!r}, and the model's {classes} classes {known}: give numbers from 0 to"
            f" {classes - 1}, or name the classes, data.labels = [...]"
        )
    if not isinstance(found, int) or not 0 <= found < classes:
        raise JobError(
            f"{where}: its label is {value!r}, and the model has {classes} classes, 0 to"
            f" {classes - 1}: set model.classes, or name another column (data.columns)"
        )
    return float(found)


def fitted(row: EncodedRow, most: int, too_long: TooLong, where: str) -> EncodedRow | None:
    """`row` with `most` tokens at most; None: it is dropped.

    Raises:
        JobError: it has more, and `too_long` is "error".
    """
    if len(row.tokens) <= most:
        return row
    if too_long == "drop":
        return None
    if too_long == "cut":
        return EncodedRow(row.tokens[:most], row.flags[:most], row.label)
    raise JobError(
        f"{where} has {len(row.tokens):,} tokens, {len(row.tokens) - most:,} more than a sample takes: raise"
        ' model.context by as many (the model must have the positions), or set data.too_long to "cut" or "drop"'
    )


def padded(rows: Sequence[NDArray[Any]], length: int, filling: int) -> Tensor:
    """int64[B, length]: each row, and `filling` after it."""
    filled = np.full((len(rows), length), filling, dtype=np.int64)
    for place, row in zip(filled, rows, strict=True):
        place[: len(row)] = row
    return torch.from_numpy(filled)
