"""Lets one process of a job watch a source for all ranks of a node; when it ends, another one takes over."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOOK_AGAIN_S = 1.0
"""Seconds between two attempts to take over."""


class NodeTurn:
    """The turn of this process, held with locks on files of this machine.

    Args:
        key: identifies the job and the node. Processes with the same key take turns.
        folder: the folder of the lock files.
    """

    def __init__(self, key: bytes, folder: str | None = None) -> None:
        name = hashlib.sha256(key).hexdigest()[:16]
        self._prefix = Path(folder or tempfile.gettempdir()) / f"freshet-notices-{os.getuid()}-{name}"

    @contextmanager
    def held(self, source: str, closed: threading.Event) -> Iterator[bool]:
        """Wait for the turn with `source`, and hold it in the context.

        Yields:
            False if `closed` was set first. A machine without file locks gives every process a turn.
        """
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(f"{self._prefix}-{source}", flags, 0o600)
        except OSError:
            yield True
            return
        try:
            yield _lock(descriptor, closed)
        finally:
            os.close(descriptor)


def _lock(descriptor: int, closed: threading.Event) -> bool:
    while not closed.is_set():
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            closed.wait(LOOK_AGAIN_S)
        except OSError:
            return True
        else:
            return True
    return False
