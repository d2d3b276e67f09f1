"""Where text comes from: each source lists the files it reads, and yields their documents one by one.

Knows nothing of tokens. Listing is cheap, so that an up-to-date cache is found without reading any text.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from workers.protocol.errors import JobError

TEXT_SUFFIXES = (".md", ".rst", ".txt")
JSONL_SUFFIXES = (".jsonl",)
_MANUAL = "pydoc_data.topics"


class Corpus(Protocol):
    """A source of text."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The files it reads, in order. While none of them changes, the text does not."""
        ...

    @property
    def name(self) -> str:
        """Part of the cache's key: all that determines the text besides the files."""
        ...

    def documents(self) -> Iterator[str]:
        """The text, document by document.

        Raises:
            JobError: a file cannot be read as what it should be.
        """
        ...


@dataclass(frozen=True)
class PythonDocs:
    """The English language manual that ships with Python, topic by topic in the order of their names."""

    files: tuple[Path, ...]
    name: str = "python-docs"

    def documents(self) -> Iterator[str]:
        topics: dict[str, str] = importlib.import_module(_MANUAL).topics
        return (topics[topic] for topic in sorted(topics))


@dataclass(frozen=True)
class TextFiles:
    """Text files, each one document."""

    files: tuple[Path, ...]
    name: str = "text"

    def documents(self) -> Iterator[str]:
        return map(_read, self.files)


@dataclass(frozen=True)
class JsonLines:
    """JSON lines, each an object with a document under `field`. Blank lines are skipped."""

    files: tuple[Path, ...]
    field: str

    @property
    def name(self) -> str:
        return f"jsonl:{self.field}"

    def documents(self) -> Iterator[str]:
        for path in self.files:
            try:
                with path.open("rb") as file:
                    for number, line in enumerate(file, start=1):
                        if line.strip():
                            yield self._document(line, f"{path}:{number}")
            except OSError as error:
                raise JobError(f"{path} cannot be read: {error.strerror}") from error

    def _document(self, line: bytes, where: str) -> str:
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise JobError(
                f"{where} is not JSON ({error}): each line must hold one whole JSON object"
            ) from error
        if not isinstance(entry, dict):
            raise JobError(
                f"{where} holds a JSON {type(entry).__name__}: each line must hold one JSON object"
            )
        if self.field not in entry:
            keys = ", ".join(sorted(entry)) or "no field at all"
            raise JobError(
                f"{where} has no field {self.field!r}, it has {keys}: set data.field to the one with the text"
            )
        text = entry[self.field]
        if not isinstance(text, str):
            raise JobError(f"{where}: the field {self.field!r} is of type {type(text).__name__}, not text")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
            raise JobError(
                f"{where}: the field {self.field!r} holds an invalid character ({error.reason})"
            ) from error
        return text


def python_docs() -> PythonDocs:
    """The manual of the running Python.

    Raises:
        JobError: this Python came without it.
    """
    try:
        spec = importlib.util.find_spec(_MANUAL)
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        raise JobError(
            f"data.source = 'python-docs': this Python came without its manual (the module {_MANUAL}):"
            " install the full standard library, or set data.source to text"
        )
    return PythonDocs((Path(spec.origin),))


def find_files(
    path: str | tuple[str, ...] | None, suffixes: tuple[str, ...], source: str, key: str = "data.path"
) -> tuple[Path, ...]:
    """The files that `path`, the value of `key` in the spec, names, in its order.

    A folder names all files below it that end in one of `suffixes` and are not empty, sorted.

    Raises:
        JobError: nothing is named, something named does not exist or is empty, or a folder has no such file.
    """
    named = (path,) if isinstance(path, str) else path or ()
    if not named:
        raise JobError(f"data.source = {source!r} needs {key}: name a file, a folder, or a list of them")
    files: list[Path] = []
    for name in named:
        entry = Path(name)
        if entry.is_dir():
            below = (file for file in entry.rglob("*") if file.suffix.lower() in suffixes and file.is_file())
            found = sorted((file for file in below if file.stat().st_size), key=Path.as_posix)
            if not found:
                raise JobError(
                    f"{key}: the folder {name} holds no file ending in {', '.join(suffixes)} with"
                    " anything in it: name another folder, or the files themselves"
                )
            files.extend(found)
        elif not entry.is_file():
            raise JobError(f"{key}: {name} does not exist (looked in {Path.cwd()}): check the name")
        elif entry.stat().st_size == 0:
            raise JobError(f"{key}: {name} is empty: name a file with something in it")
        else:
            files.append(entry)
    return tuple(files)


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise JobError(
            f"{path} is not UTF-8 text (byte {error.start}: {error.reason}): convert it, or leave it out of"
            " data.path"
        ) from error
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}") from error
