"""A state stream's reader sleeps until there is something to do: it shares the interpreter with training."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from pace import patient

from workers.state_stream.frames import READ_AT_ONCE, PeerGone, WatchedSocket

PACKET = 1000
PACKETS = 64
APART_S = 0.005


class Counting(socket.socket):
    """A socket that counts reads."""

    reads = 0

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        got = super().recv_into(buffer, nbytes, flags)
        self.reads += 1
        return got


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Counting]]:
    with socket.create_server(("127.0.0.1", 0)) as listener, Counting() as reader:
        reader.connect(listener.getsockname())
        writer, _ = listener.accept()
        with writer:
            writer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield writer, reader


def trickle(writer: socket.socket, packets: int) -> None:
    for number in range(packets):
        writer.sendall(bytes([number]) * PACKET)
        time.sleep(APART_S)


def test_a_reader_is_not_woken_by_every_packet(ends: tuple[socket.socket, Counting]) -> None:
    writer, reader = ends
    line = WatchedSocket(reader, threading.Event(), 5.0)
    sending = threading.Thread(target=trickle, args=(writer, PACKETS))
    sending.start()
    try:
        data = line.read(PACKET * PACKETS)
    finally:
        sending.join()
    assert data == b"".join(bytes([number]) * PACKET for number in range(PACKETS))
    assert READ_AT_ONCE < PACKET * PACKETS < 2 * READ_AT_ONCE
    assert reader.reads <= 2


def test_the_last_bytes_do_not_wait_for_more(ends: tuple[socket.socket, Counting]) -> None:
    writer, reader = ends
    line = WatchedSocket(reader, threading.Event(), 5.0)
    writer.sendall(bytes(READ_AT_ONCE) + b"last" + b"next")
    assert line.read(READ_AT_ONCE) == bytes(READ_AT_ONCE)
    assert line.read(4) == b"last"
    assert line.read(4) == b"next"


def test_a_peer_that_goes_in_the_middle_is_noticed_at_once(ends: tuple[socket.socket, Counting]) -> None:
    writer, reader = ends
    line = WatchedSocket(reader, threading.Event(), 30.0)
    writer.sendall(bytes(PACKET))
    writer.close()
    begun_s = time.monotonic()
    with pytest.raises(PeerGone, match="closed the connection"):
        line.read(READ_AT_ONCE)
    assert time.monotonic() - begun_s < patient(5)


def test_what_was_read_can_be_cut_while_somebody_keeps_the_frames(
    ends: tuple[socket.socket, Counting], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = ends
    line = WatchedSocket(reader, threading.Event(), 5.0)
    writer.sendall(bytes(PACKET))
    kept: list[Any] = []
    monkeypatch.setattr(line, "_sleep_until", lambda count: kept.append(sys._getframe(1)))
    data = line.read(PACKET)
    assert kept
    del data[4:]
    assert len(data) == 4
