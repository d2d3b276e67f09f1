"""Connection to each rank and address where it answers handshakes, exchanged through the generation's store.

Gloo names neither. Each rank says which local addresses its connections have: the far end of a connection is one of
them. Its door is a listener that nobody reads from: the kernel answers there, however busy the rank is.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from workers.transport.connections import Socket, borrowed

WAITING = 128
"""Handshakes that may lie at the door until the rank takes them away."""


@dataclass(frozen=True)
class PeerRoute:
    """To another rank."""

    connection: Socket
    door: tuple[str, int]
    """Address and port."""


class Peers:
    """One rank's connections by peer.

    Args:
        store: shared by the generation.
        rank: among its members.
        connections: of this rank.

    Raises:
        OSError: this machine has no port left.
        RuntimeError: the store is gone.
    """

    def __init__(self, store: dist.Store, rank: int, connections: Sequence[Socket]) -> None:
        self._store = store
        self._far: dict[str, Socket] = {}
        near: set[str] = set()
        host = ""
        for one in connections:
            with suppress(OSError), borrowed(one) as connection:
                here, there = connection.getsockname(), connection.getpeername()
                near.add(_named(here))
                self._far[_named(there)] = one
                host = here[0]
        self._door: socket.socket | None = None
        if host:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._door = socket.create_server((host, 0), family=family, backlog=WAITING)
            self._door.setblocking(False)
            said = {"near": sorted(near), "door": [host, self._door.getsockname()[1]]}
            try:
                store.set(f"ways/{rank}", json.dumps(said))
            except RuntimeError:
                self._door.close()
                raise

    def way(self, peer: int) -> PeerRoute | None:
        """The way to `peer`; None as long as it has not told.

        Raises:
            RuntimeError: the store is gone.
        """
        key = f"ways/{peer}"
        if not self._store.check([key]):
            return None
        said: Any = json.loads(self._store.get(key))
        found = [self._far[name] for name in said["near"] if name in self._far]
        host, port = said["door"]
        return PeerRoute(found[0], (str(host), int(port))) if found else None

    def answer(self) -> None:
        """Take away the handshakes that lie at the door."""
        while self._door is not None:
            try:
                self._door.accept()[0].close()
            except ConnectionError:  # it was reset meanwhile
                continue
            except OSError:
                return

    def close(self) -> None:
        """Close the door."""
        if self._door is not None:
            self._door.close()


def _named(address: Any) -> str:
    return f"{address[0]} {address[1]}"
