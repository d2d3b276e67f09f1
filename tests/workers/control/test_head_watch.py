"""A control store that ends, one that only drops a connection, and one that comes back, as a real socket tells them."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from workers.control import head_watch
from workers.control.head_watch import TRIES, HeadWatch, host_and_port_of

LIMIT_S = 60.0


class Store:
    """Something that listens, as the control store of a cluster does."""

    def __init__(self, port: int = 0) -> None:
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(("127.0.0.1", port))
        self._listener.listen()
        self._listener.settimeout(LIMIT_S)
        self.port: int = self._listener.getsockname()[1]

    def accept(self) -> socket.socket:
        return self._listener.accept()[0]

    def close(self) -> None:
        self._listener.close()


@contextmanager
def watched(port: int) -> Iterator[queue.Queue[str]]:
    """What a watch of the store at `port` tells."""
    told: queue.Queue[str] = queue.Queue()
    watch = HeadWatch(("127.0.0.1", port), lambda: told.put("lost"), lambda: told.put("back"))
    try:
        yield told
    finally:
        watch.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_watch, "PAUSE_S", 0.01)
    monkeypatch.setattr(head_watch, "AGAIN_S", 0.01)


def test_a_store_that_ends_is_lost_and_one_in_its_place_is_back() -> None:
    store = Store()
    with watched(store.port) as told:
        # It drops idle clients, and says something of its own, as a server of HTTP/2 does: both tell nothing.
        store.accept().close()
        with closing(store.accept()) as connection:
            connection.sendall(b"\0\0\0\4\0\0\0\0\0")
            assert told.empty()
            store.close()
        assert told.get(timeout=LIMIT_S) == "lost"
        with closing(Store(store.port)) as again, closing(again.accept()):
            assert told.get(timeout=LIMIT_S) == "back"
        assert told.get(timeout=LIMIT_S) == "lost"
        assert told.empty()


def test_a_store_that_was_never_reached_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Store()) as store:
        port = store.port
    tries = threading.Semaphore(0)
    connect = socket.create_connection

    def counted(*arguments: Any, **options: Any) -> socket.socket:
        tries.release()
        return connect(*arguments, **options)

    monkeypatch.setattr(socket, "create_connection", counted)
    with watched(port) as told:
        for _ in range(TRIES + 2):
            assert tries.acquire(timeout=LIMIT_S)
        assert told.empty()
        with closing(Store(port)) as late, closing(late.accept()):
            assert told.empty()
        assert told.get(timeout=LIMIT_S) == "lost"


def test_addresses_of_stores() -> None:
    assert host_and_port_of("10.0.0.7:6379") == ("10.0.0.7", 6379)
    assert host_and_port_of("[fd00::7]:6379") == ("fd00::7", 6379)
