"""Samples of several whole rows each, by an index on disk: made once, and shared by every rank on the machine.

The file of an index holds, as 64-bit integers, the numbers of all rows, sample by sample, and then where each sample
begins among them. Its name is a hash of all that determines it.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, insort
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from workers.data.tables.stored_rows import RowRange
from workers.data.tasks.task import EncodedRow
from workers.data.token_cache import replacing
from workers.protocol.errors import JobError

_FORMAT = 1
"""Raised whenever the same rows would be packed in another way."""


class PackedRows:
    """Samples of several rows, packed as `best_fit` returns it."""

    def __init__(
        self, rows: RowRange, order: NDArray[np.int64], starts: NDArray[np.int64], sha256: str
    ) -> None:
        self._rows, self._order, self._starts = rows, order, starts
        self.sha256 = sha256
        """SHA-256 of all that determines the samples."""

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> list[EncodedRow]:
        within = slice(self._starts[number], self._starts[number + 1])
        return [self._rows[int(row)] for row in self._order[within]]


def best_fit(sizes: NDArray[np.int64], room: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Things of some sizes in as few bins as can be found quickly: each, the largest first, goes where the least room
    is left that takes it (best fit decreasing, Johnson 1974), in O(n log n) for a given `room`.

    Args:
        sizes: int64[n], each in [1, room].
        room: of a bin.

    Returns:
        (the numbers of all things, bin by bin, in their own order within each, int64[n]; where each bin begins among
        them, and n, int64[bins + 1]).
    """
    bin_of = np.empty(len(sizes), dtype=np.int64)
    bins: list[list[int]] = [[] for _ in range(room + 1)]
    """Room that is left -> the bins with that much."""
    left: list[int] = []
    """Each room that is left in some bin, ascending."""
    count, lengths = 0, sizes.tolist()
    for thing in np.argsort(-sizes, kind="stable").tolist():
        at = bisect_left(left, lengths[thing])
        if at == len(left):
            found, rest = count, room - lengths[thing]
            count += 1
        else:
            found, rest = bins[left[at]].pop(), left[at] - lengths[thing]
            if not bins[left[at]]:
                del left[at]
        bin_of[thing] = found
        if rest:
            if not bins[rest]:
                insort(left, rest)
            bins[rest].append(found)
    starts = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(np.bincount(bin_of, minlength=count), out=starts[1:])
    return np.argsort(bin_of, kind="stable"), starts


def open_packed(rows: RowRange, room: int, folder: Path) -> PackedRows:
    """Samples of `rows`, each of `room` places, of which a row takes one fewer than it has tokens.

    Writes their index to `folder` unless it is there.

    Raises:
        JobError: `folder` cannot be written, or the index is damaged.
    """
    determined_by = [_FORMAT, rows.rows.sha256, rows.first, rows.stop, room]
    sha256 = hashlib.sha256(json.dumps(determined_by).encode()).hexdigest()
    path = folder / f"{sha256[:32]}.packed"
    if not path.exists():
        try:
            with replacing(path) as file:
                for numbers in best_fit(rows.sizes() - 1, room):
                    file.write(numbers.tobytes())
        except OSError as error:
            raise JobError(
                f"the index of packed rows {path} cannot be written ({error.strerror}): set data.cache to a folder that"
                " takes it"
            ) from error
    count = len(rows)
    try:
        numbers = np.memmap(path, dtype=np.int64, mode="r")
        if len(numbers) <= count or numbers[count] != 0 or numbers[-1] != count:
            raise ValueError(f"it does not hold {count:,} rows")
    except (OSError, ValueError) as error:
        raise JobError(
            f"the index of packed rows {path} cannot be read ({error}): delete it, it is made again"
        ) from error
    return PackedRows(rows, numbers[:count], numbers[count:], sha256)
