"""Watches the head of the cluster over an idle connection to its control store: a thread that reads until the peer is
gone costs training nothing, and learns at once that a process ended. Knows no Ray.

The connection sends nothing, and what comes is not looked at.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

CONNECT_S = 2.0
"""Limit for a reachable store to accept or refuse a connection."""
TRIES, PAUSE_S = 3, 0.25
"""Attempts in a row that fail before the head counts as lost, and the pause between two."""
AGAIN_S = 1.0
"""Between two attempts to reach a lost head, or a store that closes connections at once."""
KEEPALIVE = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
"""A machine that is gone is noticed after 10 s: the first wait, then the probes."""


def host_and_port_of(address: str) -> tuple[str, int]:
    """`HOST:PORT` as a pair."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


class HeadWatch:
    """Watches the store at `address`, from the constructor on until `close`.

    Args:
        lost: called when it can no longer be reached.
        back: called when it can be reached again after that.
    """

    def __init__(self, address: tuple[str, int], lost: Callable[[], None], back: Callable[[], None]) -> None:
        self._address = address
        self._lost = lost
        self._back = back
        self._closed = threading.Event()
        self._connection: socket.socket | None = None
        threading.Thread(target=self._run, name="head watch", daemon=True).start()

    def close(self) -> None:
        """Watch no longer."""
        self._closed.set()
        if (connection := self._connection) is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        known, lost, failed = False, False, 0
        while not self._closed.is_set():
            connection = self._connection = self._connect()
            if connection is not None:
                if lost:
                    self._back()
                known, lost, failed = True, False, 0
                begun_s = time.monotonic()
                _read_to_the_end(connection)
                if time.monotonic() - begun_s < AGAIN_S:
                    self._closed.wait(PAUSE_S)
                continue
            failed += 1
            # A store that this machine never reached tells nothing.
            if known and not lost and failed >= TRIES:
                lost = True
                self._lost()
            self._closed.wait(PAUSE_S if known and not lost else AGAIN_S)

    def _connect(self) -> socket.socket | None:
        try:
            connection = socket.create_connection(self._address, timeout=CONNECT_S)
        except OSError:
            return None
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):  # not on every system
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        connection.settimeout(None)
        return connection


def _read_to_the_end(connection: socket.socket) -> None:
    """Read, and forget, until the peer closes the connection or is gone."""
    with connection:
        try:
            while connection.recv(4096):
                pass
        except OSError:
            return
