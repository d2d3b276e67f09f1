"""Whether bytes wait in the kernel's send queues of sockets that a library opened and does not show.

Asking costs the library's users nothing: it is two system calls per connection, in the thread of who asks. Where the
system is not Linux there is nothing to see, and nothing is ever pending.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

_ALL_UNACKNOWLEDGED = 0x5411
"""SIOCOUTQ: bytes written that the other end has not acknowledged."""
_UNSENT = 0x894B
"""SIOCOUTQNSD: bytes written that have not been sent at all."""
SETTLED_S = 0.002
"""Bytes all sent, of which nobody acknowledges any for so long, have left this machine: the other end puts off its
acknowledgement, by up to 40 ms, until it has something to say itself."""
_LOOK_AGAIN_S = 1.0


@dataclass
class _Queue:
    descriptor: int
    inode: int
    unacknowledged: int = 0
    since_s: float = 0.0
    """When that number was first seen."""


class SendQueues:
    """The connections opened in this process from now on, until they are settled.

    Connections tagged for low priority (state streams) are none of them.

    Args:
        but: a port at either end of connections that are none of them either.
        growing: look for more ones now and then, for ever, as the library opens them when it needs them.
    """

    def __init__(
        self, *, but: int = 0, growing: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._but = but
        self._growing = growing
        self._clock = clock
        self._others = frozenset(_connections(but))
        self._queues: list[_Queue] = []
        self._looked_s = float("-inf")

    def settle(self) -> None:
        """Take up the connections that there are by now."""
        known = {(queue.descriptor, queue.inode) for queue in self._queues}
        self._queues += [_Queue(*key) for key in _connections(self._but) if key not in self._others | known]
        self._looked_s = self._clock()

    @property
    def open(self) -> int:
        """How many of them are."""
        return sum(_is_open(queue) for queue in self._queues)

    def pending(self) -> bool:
        """Whether any bytes are on their way out of this machine."""
        now_s = self._clock()
        if self._growing and now_s - self._looked_s >= _LOOK_AGAIN_S:
            self.settle()
        # All of them are looked at, so that a change of any is seen when it happens.
        return sum(self._is_pending(queue, now_s) for queue in self._queues) > 0

    def _is_pending(self, queue: _Queue, now_s: float) -> bool:
        try:
            if not _is_open(queue):
                return False
            unacknowledged = _ask(queue.descriptor, _ALL_UNACKNOWLEDGED)
            if not unacknowledged:
                queue.unacknowledged = 0
                return False
            if unacknowledged != queue.unacknowledged:
                queue.unacknowledged = unacknowledged
                queue.since_s = now_s
            return now_s - queue.since_s < SETTLED_S or _ask(queue.descriptor, _UNSENT) > 0
        except OSError:  # closed
            return False


def _is_open(queue: _Queue) -> bool:
    try:
        return os.fstat(queue.descriptor).st_ino == queue.inode
    except OSError:
        return False


def _ask(descriptor: int, what: int) -> int:
    return struct.unpack("i", fcntl.ioctl(descriptor, what, b"\0\0\0\0"))[0]


def _connections(but: int) -> list[tuple[int, int]]:
    """(descriptor, inode) of this process's connected TCP sockets that are not tagged."""
    found: list[tuple[int, int]] = []
    with suppress(FileNotFoundError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    continue
                if _is_untagged_connection(int(name), but):
                    found.append((int(name), os.fstat(int(name)).st_ino))
    return found


def _is_untagged_connection(descriptor: int, but: int) -> bool:
    # Without duplicating the descriptor: a duplicate would keep the connection open when its owner closes it.
    borrowed = socket.socket(fileno=descriptor)
    try:
        if borrowed.family not in (socket.AF_INET, socket.AF_INET6) or borrowed.type != socket.SOCK_STREAM:
            return False
        ports = (borrowed.getpeername()[1], borrowed.getsockname()[1])
        return but not in ports and borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == 0
    finally:
        borrowed.detach()
