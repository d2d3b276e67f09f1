"""Lets one process of a job watch a source for all ranks of a node; when it ends, another one takes over."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LOOK_AGAIN_S = 1.0
"""Seconds between two attempts to take over."""


class NodeTurn:
    """The turn of this process, held with names of Linux's abstract sockets: nobody connects to them, and they end with
    the process that holds them, however it ends. No file is left.

    Args:
        key: identifies the job and the node. Processes with the same key take turns.
    """

    def __init__(self, key: bytes) -> None:
        self._prefix = f"\0freshet-notices-{os.getuid()}-{hashlib.sha256(key).hexdigest()[:32]}"

    @contextmanager
    def held(self, source: str, closed: threading.Event) -> Iterator[bool]:
        """Wait for the turn with `source`, and hold it in the context.

        Yields:
            False if `closed` was set first. A machine without such names gives every process a turn.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as name:
            yield _take(name, f"{self._prefix}-{source}", closed)


def _take(name: socket.socket, address: str, closed: threading.Event) -> bool:
    while not closed.is_set():
        try:
            name.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return True
            closed.wait(LOOK_AGAIN_S)
        else:
            return True
    return False
