"""The end of a file that may be long and may grow: an event log, a rank's output. Reads no more than it is told to, and
nothing but a regular file where it is expected: folders of runs may hold anything."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FileEnd:
    """The end of a file."""

    content: bytes
    cut: bool
    """Whether there is more before it. Then `content` begins with a whole line."""


def file_end(folder: Path, name: str, most_bytes: int) -> FileEnd | None:
    """At most the last `most_bytes` of the file `name`, a relative path, in `folder`; None where there is no such
    regular file, or a symbolic link leads to it."""
    path = os.path.join(os.path.realpath(folder), name)
    if os.path.realpath(path) != path:
        return None
    try:
        # A pipe without a writer would be waited for.
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    state = os.fstat(file)
    if not stat.S_ISREG(state.st_mode):
        os.close(file)
        return None
    with os.fdopen(file, "rb") as opened:
        first = max(0, state.st_size - most_bytes)
        opened.seek(first)
        content = opened.read(most_bytes)
    if first:
        _, newline, rest = content.partition(b"\n")
        content = rest if newline else content
    return FileEnd(content, first > 0)
