"""Tells whether bytes wait in the kernel's send queues of connections that a library does not expose.

A check costs the library's users nothing: two system calls per connection, in the thread that checks.
"""

from __future__ import annotations

import fcntl
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from workers.transport.connections import Connections, Socket

_ALL_UNACKNOWLEDGED = 0x5411
"""SIOCOUTQ: written bytes that the other end has not acknowledged."""
_UNSENT = 0x894B
"""SIOCOUTQNSD: written bytes that have not been sent at all."""
ACKNOWLEDGEMENT_S = 0.002
"""Sent bytes count as having left this machine when none of them is acknowledged for this long: the other end
delays its acknowledgement, by up to 40 ms, until it has data of its own to send."""
_LOOK_AGAIN_S = 1.0


@dataclass
class _Queue:
    socket: Socket
    unacknowledged: int = 0
    since_s: float = 0.0
    """When `unacknowledged` was first seen at its present value."""


@dataclass(eq=False)
class SendQueues:
    """The send queues of one library's connections.

    Args:
        connections: finds the library's connections.
        growing: the library opens connections as it needs them, so look for new ones now and then.
    """

    connections: Connections
    growing: bool = field(default=False, kw_only=True)
    clock: Callable[[], float] = field(default=time.monotonic, kw_only=True)
    _queues: list[_Queue] = field(default_factory=list, init=False)
    _looked_s: float = field(default=float("-inf"), init=False)

    def find_new(self) -> None:
        """Add the connections opened since the last call."""
        known = {queue.socket for queue in self._queues}
        self._queues += [_Queue(one) for one in self.connections.find() - known]
        self._looked_s = self.clock()

    @property
    def sockets(self) -> tuple[Socket, ...]:
        """The connections, open or not."""
        return tuple(queue.socket for queue in self._queues)

    @property
    def open(self) -> int:
        """Number of connections that are still open."""
        return sum(queue.socket.is_open for queue in self._queues)

    def pending(self) -> bool:
        """Whether any bytes are on their way out of this machine."""
        now_s = self.clock()
        if self.growing and now_s - self._looked_s >= _LOOK_AGAIN_S:
            self.find_new()
        # Check all of them, so that a change in any is seen when it happens.
        return sum(self._is_pending(queue, now_s) for queue in self._queues) > 0

    def _is_pending(self, queue: _Queue, now_s: float) -> bool:
        try:
            if not queue.socket.is_open:
                return False
            unacknowledged = _ask(queue.socket.descriptor, _ALL_UNACKNOWLEDGED)
            if not unacknowledged:
                queue.unacknowledged = 0
                return False
            if unacknowledged != queue.unacknowledged:
                queue.unacknowledged = unacknowledged
                queue.since_s = now_s
            return now_s - queue.since_s < ACKNOWLEDGEMENT_S or _ask(queue.socket.descriptor, _UNSENT) > 0
        except OSError:  # closed
            return False


def _ask(descriptor: int, what: int) -> int:
    return struct.unpack("i", fcntl.ioctl(descriptor, what, b"\0\0\0\0"))[0]
