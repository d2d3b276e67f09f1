"""What looks at a connection tell of a link, and what a real connection tells of itself."""

from __future__ import annotations

import json
import os
import socket
from typing import Any, cast

import pytest

from workers.transport.connections import Socket
from workers.transport.link_meter import ConnectionReading, passage
from workers.transport.peers import Peers
from workers.transport.tcp_state import TcpState, tcp_state


def look(
    at_s: float, acked: int, *, waits: bool, busy_s: float | None = None, refused_s: float = 0.0
) -> ConnectionReading:
    state = TcpState(
        acked_bytes=acked,
        flying_packets=1,
        unsent_bytes=1000 if waits else 0,
        busy_s=at_s if busy_s is None else busy_s,
        refused_s=refused_s,
        round_trip_s=1e-4,
    )
    return ConnectionReading(at_s, state)


def test_the_rate_counts_while_bytes_wait_and_not_until_the_last_acknowledgement() -> None:
    looks = [
        look(0.0, 0, waits=False),
        look(0.001, 10_000, waits=True),
        look(0.02, 200_000, waits=True),
        look(0.041, 410_000, waits=True),
        # One packet whose acknowledgement is held back.
        look(0.08, 500_000, waits=False),
    ]
    passed = passage(looks, 500_000)
    assert passed == (400_000, pytest.approx(0.04), False)


def test_a_message_that_has_gone_before_it_is_looked_at_is_a_bound() -> None:
    looks = [look(0.0, 0, waits=False), look(0.001, 500_000, waits=False)]
    assert passage(looks, 500_000) == (500_000, pytest.approx(0.001), True)


def test_a_slow_begin_counts_for_no_more_than_the_whole_message() -> None:
    looks = [
        look(0.0, 0, waits=False),
        look(0.0005, 0, waits=True),
        look(0.003, 25_000, waits=True),
        look(0.005, 500_000, waits=False),
    ]
    assert passage(looks, 500_000) == (500_000, pytest.approx(0.005), True)


def test_a_whole_message_that_was_as_slow_as_its_part_confirms_it() -> None:
    looks = [
        look(0.0, 0, waits=False),
        look(0.001, 0, waits=True),
        look(0.041, 800_000, waits=True),
        look(0.048, 1_000_000, waits=False),
    ]
    assert passage(looks, 1_000_000) == (1_000_000, pytest.approx(0.048), False)


@pytest.mark.parametrize("how", ["idle", "refused", "stands"])
def test_time_in_which_the_link_was_not_what_held_it_up_tells_nothing(how: str) -> None:
    last = look(
        0.1,
        0 if how == "stands" else 100_000,
        waits=True,
        busy_s=0.02 if how == "idle" else None,
        refused_s=0.09 if how == "refused" else 0.0,
    )
    assert passage([look(0.0, 0, waits=False), look(0.001, 0, waits=True), last], 500_000) is None


def test_a_connection_tells_what_has_arrived() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as near,
    ):
        far, _ = server.accept()
        before = tcp_state(near)
        assert before is not None
        assert before.round_trip_s > 0
        near.sendall(b"x" * 100)
        with far:
            assert far.recv(100, socket.MSG_WAITALL) == b"x" * 100
            far.sendall(b"y")
            assert near.recv(1) == b"y"
            after = tcp_state(near)
        assert after is not None
        assert after.acked_bytes - before.acked_bytes == 100
        assert not after.waiting


def test_a_rank_whose_store_is_gone_leaves_no_port_behind() -> None:
    class Gone:
        door: tuple[str, int] | None = None

        def set(self, key: str, said: str) -> None:
            self.door = tuple(json.loads(said)["door"])
            raise RuntimeError("broken pipe")

    store = Gone()
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as near,
    ):
        mine = Socket(near.fileno(), os.fstat(near.fileno()).st_ino)
        with pytest.raises(RuntimeError, match="broken pipe"):
            Peers(cast("Any", store), 0, [mine])
    assert store.door is not None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(store.door)
