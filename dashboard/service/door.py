"""Accepts connections, as many as `OpenConnections` admits, and hands each to a protocol. Knows no HTTP beyond the
answer to those that are refused."""

from __future__ import annotations

import asyncio
import itertools
import logging
import resource
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

from dashboard.service.connections import Limits, OpenConnections, network_of
from dashboard.service.limits import RateLimit

log = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
"""Limit for a TLS handshake."""
AT_ONCE = 32
"""Connections accepted in one turn of the event loop."""
MOST_PER_S, MOST_IN_A_BURST = 200.0, 1_000
"""New connections of one address."""
RETRY_S = 1.0
"""Pause in accepting connections after the system could not provide one."""
WANTED_FILES, OWN_FILES = 8_192, 200
"""Files that the process may have open, if the system lets it, and how many of them are left to all but connections."""
BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 5\r\nContent-Length: 25\r\n"
    b"Content-Type: text/plain\r\n\r\ntoo many open connections"
)


class Visit:
    """One connection, as its protocol tells of it."""

    def __init__(self, number: int, connections: OpenConnections, left: Callable[[int], None]) -> None:
        self.transport: asyncio.Transport | None = None
        self._number = number
        self._connections = connections
        self._left = left

    def serve(self) -> None:
        """A request is being served."""
        self._connections.serve(self._number)

    def wait(self, *, known: bool) -> None:
        """No request is being served.

        Args:
            known: whether the last one had a valid token.
        """
        self._connections.wait(self._number, known=known)

    def leave(self) -> None:
        """The connection is closed."""
        self._left(self._number)


Answering = Callable[[Visit], asyncio.Protocol]
"""Makes the protocol of a connection. It sets the visit's transport, and tells it what it does."""


class Door:
    """Accepts connections on `listener` while it is open. Use it on an event loop.

    Args:
        encryption: of connections; None: they are plain.
    """

    def __init__(
        self,
        listener: socket.socket,
        answering: Answering,
        encryption: ssl.SSLContext | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._listener = listener
        self._answering = answering
        self._encryption = encryption
        self._loop = asyncio.get_running_loop()
        self.connections = OpenConnections(limits or limits_here())
        self._rate = RateLimit(per_s=MOST_PER_S, burst=MOST_IN_A_BURST)
        self._numbers = itertools.count()
        self._visits: dict[int, Visit] = {}
        self._arriving: dict[int, asyncio.Task[None]] = {}
        self._open = False

    def open(self) -> None:
        """Begin to accept connections."""
        self._open = True
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Accept no more, and end those that have not arrived yet."""
        self._open = False
        self._loop.remove_reader(self._listener)
        for task in self._arriving.values():
            task.cancel()

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                connection, peer = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.warning("no connection can be accepted: %s", error.strerror or error)
                self._loop.remove_reader(self._listener)
                self._loop.call_later(RETRY_S, self._again)
                return
            self._admit(connection, network_of(peer[0]))

    def _again(self) -> None:
        if self._open:
            self.open()

    def _admit(self, connection: socket.socket, address: str) -> None:
        connection.setblocking(False)
        number = next(self._numbers)
        if self._rate.wait_s(address, self._loop.time()):
            self._refuse(connection, address, "it connects too often")
            return
        admission = self.connections.admit(number, address)
        if admission.refused:
            self._refuse(connection, address, admission.refused)
            return
        if admission.closes is not None:
            log.warning("a connection without a request is closed, for one of %s", address)
            self._close(admission.closes)
        visit = self._visits[number] = Visit(number, self.connections, self._left)
        task = self._loop.create_task(self._hand_over(visit, connection))
        self._arriving[number] = task
        task.add_done_callback(lambda _: self._arriving.pop(number, None))

    def _refuse(self, connection: socket.socket, address: str, why: str) -> None:
        log.warning("a connection of %s is refused: %s", address, why)
        with connection, suppress(OSError):
            if self._encryption is None:
                connection.send(BUSY)

    def _close(self, number: int) -> None:
        if (task := self._arriving.get(number)) is not None:
            task.cancel()
        elif (visit := self._visits.get(number)) is not None and visit.transport is not None:
            visit.transport.abort()

    def _left(self, number: int) -> None:
        self._visits.pop(number, None)
        self.connections.leave(number)

    async def _hand_over(self, visit: Visit, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._answering(visit),
                connection,
                ssl=self._encryption,
                ssl_handshake_timeout=HANDSHAKE_S if self._encryption is not None else None,
            )
        except (OSError, asyncio.CancelledError) as error:  # of the handshake, too
            connection.close()
            visit.leave()
            if isinstance(error, asyncio.CancelledError):
                raise


def limits_here() -> Limits:
    """Connection limits of this process. Raises its limit of open files first, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    most = Limits().most if soft == resource.RLIM_INFINITY else min(Limits().most, max(16, soft - OWN_FILES))
    return Limits(
        most=most,
        most_each=min(Limits().most_each, most),
        strangers=min(Limits().strangers, most // 2),
        strangers_each=min(Limits().strangers_each, most // 4),
    )
