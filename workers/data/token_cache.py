"""Tokens on disk, memory-mapped: a corpus is tokenised once and shared by every rank on the machine.

A cache file holds the tokens alone, as the smallest unsigned integers that fit the vocabulary. Its name is a hash of
all that determines them, so a changed text has another cache. Beside it lies the sha256 of the tokens: two corpora with
the same one are the same, wherever they lie. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from workers.data.corpus import Corpus
from workers.data.dataset import Tokenizer
from workers.data.tokenizer import encode_array
from workers.protocol.errors import JobError

_FORMAT = 1
"""Raised whenever the same corpus would give other tokens."""
_SEPARATOR = "\n\n"
"""Between two documents."""
PARTIAL = ".partial"
"""End of the names of files and folders that are being written."""
_ABANDONED_S = 24 * 3600.0
"""Age at which one of those counts as left by a process that was killed."""


@dataclass(frozen=True)
class CachedTokens:
    """All tokens of a corpus."""

    tokens: np.memmap[Any, Any]
    """Read-only: uint8, uint16 or uint32 [tokens]."""
    sha256: str
    """SHA-256 of the cache file."""


def open_tokens(corpus: Corpus, tokenizer: Tokenizer, identity: str, folder: Path) -> CachedTokens:
    """The tokens of `corpus`.

    Writes them to `folder` unless they are there. `identity` is the tokenizer's part of the key.
    Several processes may open at once: each writes a file of its own and renames it over the others', which
    hold the same bytes.

    Raises:
        JobError: the corpus cannot be read or holds no text, or the folder cannot be written.
    """
    dtype = token_dtype(tokenizer.vocabulary)
    path = folder / f"{_key(corpus, identity)}.{dtype.name}"
    digest = path.with_name(f"{path.name}.sha256")
    if not path.exists() or not digest.exists():
        try:
            _write(corpus, tokenizer, dtype, path, digest)
        except OSError as error:
            raise JobError(
                f"the token cache {path} cannot be written ({error.strerror}): set data.cache to a folder"
                " that takes it"
            ) from error
    try:
        return CachedTokens(np.memmap(path, dtype=dtype, mode="r"), digest.read_text(encoding="ascii"))
    except (OSError, ValueError) as error:
        raise JobError(
            f"the token cache {path} cannot be read ({error}): delete it, it is made again"
        ) from error


def token_dtype(vocabulary: int) -> np.dtype[Any]:
    """The smallest unsigned integers that hold every token."""
    for dtype in (np.uint8, np.uint16):
        if vocabulary <= np.iinfo(dtype).max + 1:
            return np.dtype(dtype)
    return np.dtype(np.uint32)


def _key(corpus: Corpus, identity: str) -> str:
    stats = [(path, path.stat()) for path in corpus.files]
    files = [(str(path.resolve()), stat.st_size, stat.st_mtime_ns) for path, stat in stats]
    text = json.dumps([_FORMAT, corpus.name, identity, files])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _write(corpus: Corpus, tokenizer: Tokenizer, dtype: np.dtype[Any], path: Path, digest: Path) -> None:
    """Write the tokens, then their sha256.

    Raises:
        OSError: the disk does not take them.
        JobError: there is no text.
    """
    sha256 = hashlib.sha256()
    with replacing(path) as file:
        for index, document in enumerate(corpus.documents()):
            text = _SEPARATOR + document if index else document
            tokens = encode_array(tokenizer, text, dtype).tobytes()
            sha256.update(tokens)
            file.write(tokens)
        if file.tell() == 0:
            raise JobError(f"{', '.join(map(str, corpus.files))}: there is no text in it")
    with replacing(digest) as file:
        file.write(sha256.hexdigest().encode("ascii"))


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes the name `path` once it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(path.parent)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=PARTIAL)
    try:
        with open(descriptor, "wb") as file:
            yield file
            # The data before the name: after a crash no file may look whole and have a hole.
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def remove_abandoned(folder: Path) -> None:
    """Delete what killed processes left of cache entries that they were writing in `folder`."""
    for part in folder.glob(f"{'[0-9a-f]' * 32}.*{PARTIAL}"):
        with suppress(OSError):  # another process was quicker
            inside = part.iterdir() if part.is_dir() else ()
            written_s = max(each.stat().st_mtime for each in (part, *inside))
            if time.time() - written_s < _ABANDONED_S:
                continue
            if part.is_dir():
                shutil.rmtree(part)
            else:
                part.unlink()
