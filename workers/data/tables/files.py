"""Reads tables row by row: Parquet, JSON lines, CSV, Arrow, and folders that `save_to_disk` of datasets wrote."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from workers.data.corpus import find_files
from workers.protocol.errors import JobError

SUFFIXES: Mapping[str, str] = {
    ".parquet": "from_parquet",
    ".jsonl": "from_json",
    ".json": "from_json",
    ".csv": "from_csv",
    ".arrow": "from_file",
}
"""End of a file's name -> what reads it."""
SAVED, SAVED_SPLITS = "state.json", "dataset_dict.json"
ROWS_AT_ONCE = 1000

Rows = Mapping[str, list[Any]]
"""Column -> values of some consecutive rows."""


@dataclass(frozen=True)
class TableSource:
    """Rows that can be read again and again."""

    name: str
    """Its place, as messages tell it."""
    read: Callable[[], Iterator[Rows]]
    identify: Callable[[Collection[str]], Sequence[Any]]
    """Finds all that determines the rows of some columns, as JSON can hold it."""


def tables_at(path: str | tuple[str, ...] | None, key: str) -> tuple[TableSource, ...]:
    """The tables that `path`, the value of `key` in the spec, names; see `find_tables`."""
    return tuple(table_in_file(table, read_rows) for table in find_tables(path, key))


def table_in_file(table: Path, read: Callable[[Path], Iterator[Rows]]) -> TableSource:
    """The rows of a file or folder, as `read` reads them."""
    return TableSource(str(table), partial(read, table), lambda _: state_of(table))


def find_tables(path: str | tuple[str, ...] | None, key: str) -> tuple[Path, ...]:
    """The files, and the folders of `save_to_disk`, that `path` names, in its order.

    Args:
        key: of the spec, for messages.

    Raises:
        JobError: nothing is named, or something that does not exist or holds no table.
    """
    named = (path,) if isinstance(path, str) else path or ()
    if not named:
        raise JobError(f'data.source = "table" needs {key}: name a file, a folder, or a list of them')
    found: list[Path] = []
    for name in named:
        if (Path(name) / SAVED_SPLITS).is_file():
            raise JobError(
                f"{key}: {name} holds several splits: name one of its folders, such as {name}/train"
            )
        if (Path(name) / SAVED).is_file():
            found.append(Path(name))
            continue
        for file in find_files(name, tuple(SUFFIXES), "table", key):
            if file.suffix.lower() not in SUFFIXES:
                raise JobError(
                    f"{key}: {file} ends in none of {', '.join(SUFFIXES)}: it holds no table that is read here"
                )
            found.append(file)
    return tuple(found)


def state_of(table: Path) -> list[Any]:
    """The files behind `table`, with size and time. While none of them changes, the rows do not."""
    files = sorted(each for each in table.rglob("*") if each.is_file()) if table.is_dir() else [table]
    return [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def read_rows(table: Path) -> Iterator[Rows]:
    """The rows of `table`, some at once.

    Raises:
        JobError: the library is not installed, or the file is not what its name says.
    """
    try:
        import datasets
    except ImportError as error:
        raise JobError(
            f'data.source = "table" needs the library datasets, which is not installed: {error}; pip install'
            ' "freshet[data]"'
        ) from error
    kinds: Any = datasets
    read: Callable[[str], Any] = kinds.load_from_disk
    if not table.is_dir():
        read = getattr(kinds.IterableDataset, SUFFIXES[table.suffix.lower()])
    try:
        rows: Any = read(str(table))
        for name, kind in (rows.features or {}).items():
            if isinstance(kind, kinds.Image):  # as the file has them: bytes and path
                rows = rows.cast_column(name, kinds.Image(decode=False))
        yield from rows.iter(ROWS_AT_ONCE)
    except JobError:
        raise
    except Exception as error:  # as many kinds as there are formats
        raise JobError(f"{table} cannot be read as a table: {type(error).__name__}: {error}") from error
