"""The sha256 of files that do not change often, kept in the user's cache by size and time: weights take a second per
gigabyte to read."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path


def sha256_of(path: str, cache: Path) -> str:
    """The sha256 (hex) of the file at `path`.

    Args:
        cache: folder of what is known; a file in it that cannot be read or written costs time alone.

    Raises:
        OSError: the file cannot be read.
    """
    stat = os.stat(path)
    state = [os.path.realpath(path), stat.st_size, stat.st_mtime_ns, stat.st_ino]
    entry = cache / f"{hashlib.sha256(json.dumps(state[:1]).encode()).hexdigest()[:32]}.json"
    try:
        known = json.loads(entry.read_bytes())
        if known["file"] == state and isinstance(known["sha256"], str):
            return known["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    _keep(entry, json.dumps({"file": state, "sha256": found}))
    return found


def _keep(entry: Path, text: str) -> None:
    with suppress(OSError):
        entry.parent.mkdir(parents=True, exist_ok=True)
        descriptor, part = tempfile.mkstemp(dir=entry.parent, suffix=".partial")
        with open(descriptor, "w") as file:
            file.write(text)
        os.replace(part, entry)
