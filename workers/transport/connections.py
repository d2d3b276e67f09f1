"""Finds the connections that a library opens but does not expose, by how the library polls them.

The kernel lists the sockets of a process and those that each of its pollers (epoll instances) watches. Where
it does not, nothing is found.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_DESCRIPTORS = "/proc/self/fd"
_WATCHED = re.compile(r"^tfd:\s*(\d+) .*\bino:([0-9a-f]+)", re.MULTILINE)
"""A line of a poller's `/proc` entry: a descriptor that it watches, and its inode."""


@dataclass(frozen=True)
class Socket:
    """A socket of this process. Its inode is unique, even when the descriptor is reused."""

    descriptor: int
    inode: int

    @property
    def is_open(self) -> bool:
        try:
            return os.fstat(self.descriptor).st_ino == self.inode
        except OSError:
            return False


class Connections(Protocol):
    """The connections of one library."""

    def find(self) -> set[Socket]:
        """The connections that are open now."""
        ...


class PolledConnections:
    """Connections of a library whose poller watches both its listener and its connections.

    Gloo makes a listener and a poller for each group. Create this object before them.
    """

    def __init__(self) -> None:
        self._before = _sockets()

    def find(self) -> set[Socket]:
        found: set[Socket] = set()
        for watched in _pollers():
            if any(one not in self._before and _is_listener(one) for one in watched):
                found |= {one for one in watched if _is_connection(one)}
        return found


class UnpolledConnections:
    """Connections that no poller watches, such as NCCL's. Create this object before they are opened.

    Connections tagged for low priority (state streams) are left out.
    """

    def __init__(self) -> None:
        self._before = _sockets()

    def find(self) -> set[Socket]:
        others = self._before.union(*_pollers())
        return {one for one in _sockets() - others if _is_connection(one) and not _is_tagged(one)}


def _sockets() -> set[Socket]:
    found: set[Socket] = set()
    for descriptor, target in _descriptors():
        if target.startswith("socket:"):
            with suppress(OSError):
                found.add(Socket(descriptor, os.fstat(descriptor).st_ino))
    return found


def _pollers() -> Iterator[set[Socket]]:
    """The sockets that each poller of this process watches."""
    for descriptor, target in _descriptors():
        if target == "anon_inode:[eventpoll]":
            with suppress(OSError):
                about = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
                yield {Socket(int(number), int(inode, 16)) for number, inode in _WATCHED.findall(about)}


def _descriptors() -> Iterator[tuple[int, str]]:
    """(descriptor, target) of everything that this process has open."""
    with suppress(FileNotFoundError):
        for name in os.listdir(_DESCRIPTORS):
            with suppress(OSError):
                yield int(name), os.readlink(f"{_DESCRIPTORS}/{name}")


def _is_listener(one: Socket) -> bool:
    with suppress(OSError), borrowed(one) as connection:
        return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False


def _is_connection(one: Socket) -> bool:
    with suppress(OSError), borrowed(one) as connection:
        if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
            connection.getpeername()
            return True
    return False


def _is_tagged(one: Socket) -> bool:
    with suppress(OSError), borrowed(one) as connection:
        return connection.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) != 0
    return False


@contextmanager
def borrowed(one: Socket) -> Iterator[socket.socket]:
    """The socket, without duplicating its descriptor: a duplicate would keep the connection open when its
    owner closes it."""
    if not one.is_open:
        raise OSError("it was closed")
    connection = socket.socket(fileno=one.descriptor)
    try:
        yield connection
    finally:
        connection.detach()
