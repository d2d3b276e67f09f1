"""Reads a folder of images as a table, laid out as datasets' `imagefolder` has it: a folder per class, or the images'
names and labels in metadata.csv or metadata.jsonl; perhaps in parts `train` and `validation`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from workers.data.tables.files import (
    ROWS_AT_ONCE,
    SAVED,
    SAVED_SPLITS,
    SUFFIXES,
    Rows,
    find_tables,
    read_rows,
)
from workers.data.tasks.images import IMAGE, LABEL
from workers.protocol.errors import JobError

ENDS = (
    *(".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".gif", ".bmp", ".webp", ".tif", ".tiff"),
    *(".pbm", ".pgm", ".ppm", ".pnm"),
)
"""Ends of the names of image files."""
METADATA = ("metadata.csv", "metadata.jsonl")
FILE_NAME = "file_name"
"""Column of the metadata that names the image's file, from their folder."""
TRAINING, VALIDATION = ("train", "training"), ("validation", "valid", "val", "dev")
"""Names of a folder's parts."""


def find_images(path: str | tuple[str, ...] | None, key: str) -> tuple[Path, ...]:
    """The tables and folders of images that `path` names, in its order; of a folder in parts the one to train on.

    Args:
        key: of the spec, for messages.

    Raises:
        JobError: nothing is named, or something that does not exist or holds neither images nor a table.
    """
    found: list[Path] = []
    for name in _named(path):
        folder = Path(name)
        if _holds_images(folder):
            found.append(_part(folder, TRAINING) or folder)
            continue
        if folder.is_dir() and not any(each.suffix.lower() in SUFFIXES for each in folder.rglob("*")):
            raise JobError(
                f"{key}: the folder {name} holds neither images ({', '.join(ENDS)}) nor a table"
                f" ({', '.join(SUFFIXES)}): name another one"
            )
        found.extend(find_tables(name, key))
    return tuple(found) if found else find_tables(path, key)


def find_held_out_images(path: str | tuple[str, ...] | None) -> tuple[Path, ...]:
    """The parts to validate on of the folders of images that `path` names."""
    folders = (Path(name) for name in _named(path))
    parts = (_part(folder, VALIDATION) for folder in folders if _part(folder, TRAINING) is not None)
    return tuple(part for part in parts if part is not None)


def class_names(tables: tuple[Path, ...]) -> tuple[str, ...]:
    """The names of the classes' folders, sorted, of those of `tables` that have them."""
    folders = [table for table in tables if _is_folder(table) and _metadata(table) is None]
    return tuple(sorted({name for folder in folders for name in _classes(folder)}))


def read_images(table: Path) -> Iterator[Rows]:
    """The rows of a table or a folder of images, some at once.

    The images of classes' folders come in an order that has nothing to do with their classes, so that the last ones are
    of all of them.

    Raises:
        JobError: as `read_rows`; the metadata name no files; an image lies in no class's folder, or such a folder is
            empty.
    """
    if not _is_folder(table):
        yield from read_rows(table)
        return
    metadata = _metadata(table)
    if metadata is not None:
        for rows in read_rows(metadata):
            if FILE_NAME not in rows:
                raise JobError(
                    f"{metadata} has no column {FILE_NAME}, it has {', '.join(rows)}: name the files in it"
                )
            yield {IMAGE: rows[FILE_NAME], **rows}
        return
    files = _files(table)
    for first in range(0, len(files), ROWS_AT_ONCE):
        some = files[first : first + ROWS_AT_ONCE]
        yield {IMAGE: some, LABEL: [name.split("/")[0] for name in some]}


def _named(path: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (path,) if isinstance(path, str) else path or ()


def _is_folder(table: Path) -> bool:
    return table.is_dir() and not (table / SAVED).is_file()


def _holds_images(folder: Path) -> bool:
    if not _is_folder(folder) or (folder / SAVED_SPLITS).is_file():
        return False
    return any(each.suffix.lower() in ENDS for each in folder.rglob("*"))


def _metadata(folder: Path) -> Path | None:
    return next((folder / name for name in METADATA if (folder / name).is_file()), None)


def _part(folder: Path, names: tuple[str, ...]) -> Path | None:
    """The part of `folder` with one of `names`; a folder with images of its own is a class that has that name."""
    for name in names:
        part = folder / name
        if part.is_dir() and (
            _metadata(part) or not any(each.suffix.lower() in ENDS for each in part.iterdir())
        ):
            return part
    return None


def _files(folder: Path) -> list[str]:
    """CLASS/FILE of each image, by the sha256 of that."""
    files, empty = [], {*_classes(folder)}
    for file in folder.rglob("*"):
        parts = file.relative_to(folder).parts
        if file.suffix.lower() not in ENDS or any(map(_ignored, parts)) or not file.is_file():
            continue
        if len(parts) != 2:
            raise JobError(
                f"{file} lies in no class's folder: put it into {folder}/CLASS, or name it with its label in"
                f" {folder / METADATA[0]}"
            )
        empty.discard(parts[0])
        files.append("/".join(parts))
    if empty:
        raise JobError(
            f"{folder / min(empty)} holds no image: remove that class's folder, or put images into it"
        )
    return sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest())


def _classes(folder: Path) -> list[str]:
    return [each.name for each in folder.iterdir() if each.is_dir() and not _ignored(each.name)]


def _ignored(name: str) -> bool:
    return name.startswith((".", "__"))
