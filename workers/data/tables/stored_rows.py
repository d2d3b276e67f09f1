"""Rows of a table as tokens on disk, memory-mapped: made once, and shared by every rank on the machine.

A folder holds the tokens of all rows, a flag of each token, where rows begin, a label of each, and a note of each if
the task makes any. Its name is a hash of all that determines them. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from workers.data.tasks.task import EncodedRow
from workers.data.token_cache import PARTIAL, remove_abandoned, token_dtype
from workers.protocol.errors import JobError

_FORMAT = 1
"""Raised whenever the same table would give other rows."""
_DIGEST = "sha256"


class StoredRows:
    """All rows of a table, in its order."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        """Raises OSError or ValueError where the folder is damaged."""
        self._tokens = _mapped(folder / "tokens", token_dtype(vocabulary))
        self._flags = _mapped(folder / "flags", np.dtype(np.uint8))
        self.starts = _mapped(folder / "starts", np.dtype(np.int64))
        """Number of tokens before each row, and of all: int64[rows + 1]."""
        self._labels = _mapped(folder / "labels", np.dtype(np.float64))
        self._notes = self._note_starts = None
        if (folder / "notes").exists():
            self._notes = _mapped(folder / "notes", np.dtype(np.uint8))
            self._note_starts = _mapped(folder / "note starts", np.dtype(np.int64))
        self.sha256 = (folder / _DIGEST).read_text(encoding="ascii")

    @property
    def labels(self) -> NDArray[np.float64]:
        """The label of each row."""
        return self._labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, number: int) -> EncodedRow:
        start, stop = self.starts[number], self.starts[number + 1]
        note = b""
        if self._notes is not None and self._note_starts is not None:
            note = self._notes[self._note_starts[number] : self._note_starts[number + 1]].tobytes()
        # Views: nothing of the tokens is read where only labels are needed.
        return EncodedRow(
            self._tokens[start:stop], self._flags[start:stop], float(self._labels[number]), note
        )


class SampleSequence(Protocol):
    """Samples by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Any: ...


class Stretches(Sequence[Any]):
    """Samples of several tables, one after the other."""

    def __init__(self, parts: Sequence[SampleSequence]) -> None:
        self._parts = parts
        self.lengths = tuple(len(part) for part in parts)
        self._begins = [0, *accumulate(self.lengths)]

    def __len__(self) -> int:
        return self._begins[-1]

    def __getitem__(self, number: Any) -> Any:
        part = bisect_right(self._begins, number) - 1
        return self._parts[part][number - self._begins[part]]


@dataclass(frozen=True)
class RowRange:
    """The rows in [first, stop)."""

    rows: StoredRows
    first: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.first

    def __getitem__(self, number: int) -> EncodedRow:
        return self.rows[self.first + number]

    def sizes(self) -> NDArray[np.int64]:
        """Number of tokens of each."""
        return np.diff(self.rows.starts[self.first : self.stop + 1])


def open_rows(
    rows: Callable[[], Iterable[EncodedRow]], determined_by: Any, vocabulary: int, folder: Path
) -> StoredRows:
    """The rows that `rows` makes, written to `folder` unless they are there.

    Args:
        determined_by: all that determines them, as JSON can hold it.
        vocabulary: tokens are below.

    Raises:
        JobError: as `rows`; there are none; or the folder cannot be written.
    """
    text = json.dumps([_FORMAT, determined_by])
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.rows"
    if not path.is_dir():
        try:
            _write(rows(), vocabulary, path)
        except OSError as error:
            raise JobError(
                f"the rows {path} cannot be written ({error.strerror}): set data.cache to a folder that takes them"
            ) from error
    try:
        return StoredRows(path, vocabulary)
    except (OSError, ValueError) as error:
        raise JobError(
            f"the rows {path} cannot be read ({error}): delete the folder, it is made again"
        ) from error


def _write(rows: Iterable[EncodedRow], vocabulary: int, path: Path) -> None:
    """Write a folder that takes the name `path` once it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(path.parent)
    part = Path(tempfile.mkdtemp(dir=path.parent, prefix=f"{path.name}.", suffix=PARTIAL))
    dtype, digests = (
        token_dtype(vocabulary),
        {name: hashlib.sha256() for name in ("tokens", "flags", "notes")},
    )
    starts, note_starts, labels = [0], [0], []
    try:
        with (
            (part / "tokens").open("wb") as tokens,
            (part / "flags").open("wb") as flags,
            (part / "notes").open("wb") as notes,
        ):
            for row in rows:
                for file, name, content in (
                    (tokens, "tokens", row.tokens.astype(dtype).tobytes()),
                    (flags, "flags", row.flags.tobytes()),
                    (notes, "notes", row.note),
                ):
                    digests[name].update(content)
                    file.write(content)
                starts.append(starts[-1] + len(row.tokens))
                note_starts.append(note_starts[-1] + len(row.note))
                labels.append(row.label)
        if not labels:
            raise JobError(
                "the table has no row to train on: look at data.path, data.columns and data.too_long"
            )
        whole = hashlib.sha256()
        numbered = {
            "starts": np.array(starts, dtype=np.int64),
            "labels": np.array(labels, dtype=np.float64),
            "note starts": np.array(note_starts, dtype=np.int64),
        }
        if not note_starts[-1]:
            (part / "notes").unlink()
            numbered.pop("note starts")
            digests.pop("notes")
        for name, numbers in numbered.items():
            (part / name).write_bytes(numbers.tobytes())
            whole.update(numbers.tobytes())
        for digest in digests.values():
            whole.update(digest.digest())
        (part / _DIGEST).write_text(whole.hexdigest(), encoding="ascii")
        _settle(part)
        try:
            os.rename(part, path)
        except OSError:
            if not path.is_dir():  # another process was quicker, with the same bytes
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _settle(folder: Path) -> None:
    """The data before the name: after a crash no folder may look whole and have a hole."""
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    folder.chmod(0o755)


def _mapped(file: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    if file.stat().st_size == 0:
        return np.zeros(0, dtype=dtype)
    return np.memmap(file, dtype=dtype, mode="r")
