"""Tables that a user's data source returns: a `datasets.Dataset`, or a PyTorch data set whose samples are dicts."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from workers.data.tables.files import ROWS_AT_ONCE, Rows, TableSource
from workers.process.user_code import what_it_did, where
from workers.protocol.errors import JobError
from workers.reproducibility import rng


def table_of(returned: Any, origin: str) -> TableSource | None:
    """The table that `returned` is; None: its samples are no rows.

    Args:
        origin: opens every message, e.g. "data.source = 'my_rows:open'".

    Raises:
        JobError: it is several tables.
    """
    library: Any = sys.modules.get("datasets")
    if library is not None and isinstance(returned, library.DatasetDict):
        raise JobError(
            f"{origin} returned the splits {', '.join(map(str, returned))}: return one of them; held-out rows are its"
            " last ones (data.validation_fraction), or tables of their own (data.validation_path)"
        )
    if library is not None and isinstance(returned, library.Dataset):
        return TableSource(
            origin, partial(_read_library, returned, origin), lambda _: [returned._fingerprint]
        )
    map_style = all(hasattr(returned, member) for member in ("__len__", "__getitem__"))
    if not map_style or isinstance(returned, (tuple, Mapping, str)) or not len(returned):
        return None
    try:
        if not isinstance(_some(returned, 0, 1)[0], Mapping):
            return None
    except (Exception, SystemExit):  # whoever reads it next says so
        return None
    read = partial(_read_samples, returned, origin)
    return TableSource(origin, read, lambda used: [_digest(read, origin, used)])


def _read_library(rows: Any, origin: str) -> Iterator[Rows]:
    # A transform of the user's makes the rows; other formats make tensors of them.
    plain = rows if rows.format["type"] == "custom" else rows.with_format(None)
    try:
        chunks = plain.iter(ROWS_AT_ONCE)
        for start in range(0, len(plain), ROWS_AT_ONCE):
            with _draws_of(start):
                found = next(chunks)
            yield found
    except (Exception, SystemExit) as error:
        raise JobError(f"{origin}: reading its rows {what_it_did(error)}{where(error)}") from error


def _read_samples(samples: Any, origin: str) -> Iterator[Rows]:
    """Raises JobError where a sample cannot be read, or has not the columns of the first."""
    columns: tuple[str, ...] = ()
    for start in range(0, len(samples), ROWS_AT_ONCE):
        stop = min(start + ROWS_AT_ONCE, len(samples))
        try:
            rows = _some(samples, start, stop)
        except JobError:
            raise
        except (Exception, SystemExit) as error:
            raise JobError(
                f"{origin}: reading rows {start + 1} to {stop} {what_it_did(error)}{where(error)}"
            ) from error
        for number, row in enumerate(rows, start=start + 1):
            if not isinstance(row, Mapping):
                raise JobError(
                    f"{origin}, row {number} is a {type(row).__name__}: return a dict for each, as for the first"
                )
            columns = columns or tuple(row)
            if {*row} != {*columns}:
                raise JobError(
                    f"{origin}, row {number} has the columns {', '.join(map(str, row))}, and the first one"
                    f" {', '.join(map(str, columns))}: give all the same ones, None where there is nothing"
                )
        yield {column: [row[column] for row in rows] for column in columns}


def _some(samples: Any, start: int, stop: int) -> list[Any]:
    with _draws_of(start):
        return [samples[number] for number in range(start, stop)]


def _draws_of(start: int) -> rng.keyed:
    """Draws of the rows from `start` on that are the same in every process."""
    return rng.keyed(rng.key(0, "rows", start))


def _digest(read: Callable[[], Iterator[Rows]], origin: str, used: Collection[str]) -> str:
    """sha256 of the columns `used` of all rows, which tells whether they are those of before.

    Raises:
        JobError: a value is none whose hash other processes would find too.
    """
    whole = hashlib.sha256()
    for rows in read():
        for column in sorted({*used} & rows.keys()):
            try:
                whole.update(json.dumps([column, rows[column]], default=_stable).encode())
            except (TypeError, ValueError, RecursionError) as error:
                raise JobError(
                    f"{origin}: column {column!r} holds a value whose hash other processes would not find ({error}):"
                    " give texts and numbers, or lists and dicts of them"
                ) from error
    return whole.hexdigest()


def _stable(value: Any) -> Any:
    """A value that JSON does not know, as one that it does."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, bytes):
        return ["bytes", hashlib.sha256(value).hexdigest()]
    if not isinstance(value, (np.ndarray, np.generic)):
        raise TypeError(f"it is of type {type(value).__name__}")
    array = np.asarray(value)
    content = array.tolist() if array.dtype.hasobject else hashlib.sha256(array.tobytes()).hexdigest()
    return [array.dtype.str, array.shape, content]
