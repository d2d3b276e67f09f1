"""A file is read once for its sha256, and again when it has changed."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from orchestrator.prepare.model_outline import sha256_of


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(b"weights")
    return path


def poisoned(cache: Path) -> Path:
    """The one entry of the cache, which now tells a sha256 that no file has."""
    (entry,) = cache.iterdir()
    entry.write_text(json.dumps({**json.loads(entry.read_text()), "sha256": "kept"}))
    return entry


def test_a_file_that_is_as_it_was_is_not_read_again(file: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert sha256_of(str(file), cache) == hashlib.sha256(b"weights").hexdigest()
    poisoned(cache)
    assert sha256_of(str(file), cache) == "kept"
    assert sha256_of(str(file.parent / "." / file.name), cache) == "kept"


@pytest.mark.parametrize("how", ["other bytes", "another time", "another file"])
def test_a_file_that_has_changed_is_read(how: str, file: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    sha256_of(str(file), cache)
    poisoned(cache)
    stat = file.stat()
    if how == "other bytes":
        file.write_bytes(b"changed")
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    elif how == "another time":
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    else:
        other = tmp_path / "other"
        other.write_bytes(b"changed")
        os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        other.replace(file)
    assert sha256_of(str(file), cache) == hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize("text", ["", "no JSON", "[]", '{"file": 1}'])
def test_a_damaged_entry_costs_a_read(text: str, file: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    sha256_of(str(file), cache)
    poisoned(cache).write_text(text)
    assert sha256_of(str(file), cache) == hashlib.sha256(b"weights").hexdigest()


def test_a_cache_that_cannot_be_written_and_a_file_that_is_gone(file: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    assert sha256_of(str(file), tmp_path / "cache") == hashlib.sha256(b"weights").hexdigest()
    with pytest.raises(FileNotFoundError):
        sha256_of(str(tmp_path / "none"), tmp_path / "cache")
