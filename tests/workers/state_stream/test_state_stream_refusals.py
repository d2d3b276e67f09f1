"""A state server refuses and survives peers that do not know the secret or that alter a byte."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from jobs import job
from rank_group import SECRET as GROUP_SECRET
from rank_group import RankGroup, quiet_sha256, state_sha256, with_standbys
from state_streams import (
    FLOWS,
    HOST,
    SECRET,
    between,
    bits,
    eventually,
    fetching,
    rich_state,
    serving,
)
from test_standby import configured

from benchmarks.parts.configs import changed
from workers.protocol.reports import Report, StepReport, WarningReport
from workers.state_stream import stream as state_stream
from workers.state_stream.flow import Flow
from workers.state_stream.frames import MAGIC, FrameKind, StreamRefused, WatchedSocket, ask
from workers.state_stream.stream import MOST_STRANGERS, fetch


def test_a_wrong_secret_is_refused_and_logged() -> None:
    with serving() as to:
        to.server.offer(17, [rich_state()])
        with pytest.raises(StreamRefused, match=r"layer 3 of step 17 from .*refused this rank's secret"):
            fetch(HOST, to.server.port, b"another", 3, 17, wait_s=1)
        eventually("it is logged", lambda: bool(to.log))
        assert "does not know the job's secret" in to.log[0]
        assert to.log[0].startswith("state stream from 127.0.0.1:")
        assert bits(to.fetch()) == bits(rich_state())


def test_strangers_who_say_nothing_keep_no_rank_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_stream, "HANDSHAKE_S", 60.0)
    with serving() as to:
        to.server.offer(17, [rich_state()])
        with ExitStack() as open_ones:
            strangers = [
                open_ones.enter_context(socket.create_connection((HOST, to.server.port), 5))
                for _ in range(2 * MOST_STRANGERS)
            ]
            begun_s = time.monotonic()
            assert bits(to.fetch()) == bits(rich_state())
            # The server waited for no stranger until its handshake timed out.
            assert time.monotonic() - begun_s < state_stream.HANDSHAKE_S
            # It disconnected the oldest one to let another in.
            strangers[0].settimeout(5)
            assert strangers[0].recv(1) == b""


def test_a_server_that_does_not_know_the_secret_is_refused() -> None:
    with closing(socket.create_server((HOST, 0))) as listener:

        def pretend() -> None:
            connected, _ = listener.accept()
            with connected:
                for count, reply in ((len(MAGIC) + 32, bytes(32)), (32, b"x" * 32)):
                    assert connected.recv(count, socket.MSG_WAITALL)
                    connected.sendall(reply)
                connected.recv(1)

        with fetching(pretend), pytest.raises(StreamRefused, match="another program listens there"):
            fetch(HOST, listener.getsockname()[1], SECRET, 3, 17, wait_s=1)


@contextmanager
def greeted(port: int, secret: bytes = SECRET) -> Iterator[tuple[socket.socket, WatchedSocket, Any, Any]]:
    """A connection to the server at `port` after the handshake, with the seals for both directions."""
    with socket.create_connection((HOST, port), 5) as connected:
        line = WatchedSocket(connected, threading.Event(), 5.0)
        yield connected, line, *ask(line, secret)


def request(layer: int = 3) -> bytes:
    return json.dumps([layer, 17, 1.0]).encode()


def _oversized(line: WatchedSocket, seal: Any) -> None:
    line.write([(1 << 31).to_bytes(4, "big"), bytes([FrameKind.REQUEST])])


def _altered(line: WatchedSocket, seal: Any) -> None:
    head, _, tag = seal.frame(FrameKind.REQUEST, 0, request())
    line.write([head, request(4), tag])


def _replayed(line: WatchedSocket, seal: Any) -> None:
    line.write(seal.frame(FrameKind.REQUEST, 1, request()))


def _of_another_kind(line: WatchedSocket, seal: Any) -> None:
    line.write(seal.frame(FrameKind.CHUNK, 0, request()))


def _no_request(line: WatchedSocket, seal: Any) -> None:
    line.write(seal.frame(FrameKind.REQUEST, 0, b'{"__reduce__": 1}'))


def _endless(line: WatchedSocket, seal: Any) -> None:
    line.write(seal.frame(FrameKind.REQUEST, 0, b'[3, 17, Infinity, "all", [0, 1], false]'))


def _of_no_part(line: WatchedSocket, seal: Any) -> None:
    line.write(seal.frame(FrameKind.REQUEST, 0, b'[3, 17, 1, "half", [0, 1], false]'))


def _of_no_shard(line: WatchedSocket, seal: Any) -> None:
    line.write(seal.frame(FrameKind.REQUEST, 0, b'[3, 17, 1, "all", 2, false]'))


@pytest.mark.parametrize(
    ("send", "said"),
    [
        (_oversized, "request frame of 2147483648 bytes: at most 4096 may come"),
        (_altered, "request frame 0 was altered"),
        (_replayed, "request frame 0 was altered"),
        (_of_another_kind, "a frame of kind 3 came where 1 or 6 or 8 was expected"),
        (_no_request, "a request that is none"),
        (_endless, "waits for ever"),
        (_of_no_part, "a request that is none: 'half' is not a valid StatePart"),
        (_of_no_shard, "a request that is none: cannot unpack"),
    ],
)
def test_bad_frames_are_refused_and_logged(send: Callable[[WatchedSocket, Any], None], said: str) -> None:
    with serving() as to:
        to.server.offer(17, [rich_state()])
        with greeted(to.server.port) as (connected, line, seal, _):
            send(line, seal)
            with suppress(ConnectionResetError):
                assert connected.recv(1) == b"", "it must answer nothing"
        eventually("it is logged", lambda: bool(to.log))
        assert said in to.log[0]
        assert bits(to.fetch()) == bits(rich_state())


def test_another_protocol_is_refused_and_logged() -> None:
    with serving() as to:
        with socket.create_connection((HOST, to.server.port), 5) as connected:
            connected.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            with suppress(ConnectionResetError):
                assert connected.recv(1) == b""
        eventually("it is logged", lambda: bool(to.log))
        assert "speaks something else" in to.log[0]


def test_a_probe_is_no_attack() -> None:
    with serving() as to:
        for _ in range(20):
            socket.create_connection((HOST, to.server.port), 5).close()
        to.server.offer(17, [rich_state()])
        assert bits(to.fetch()) == bits(rich_state())
        eventually("the probes are forgotten", lambda: not to.server._peers)
        assert to.log == []


@pytest.mark.parametrize("place", [0, 32, 64 + 5 + 40, -1], ids=["nonce", "proof", "header", "last byte"])
@pytest.mark.parametrize("flow", FLOWS)
def test_an_altered_byte_is_refused(place: int, flow: Flow) -> None:
    sizes: list[int] = []

    def count(before: int, piece: bytes) -> bytes:
        sizes.append(before + len(piece))
        return piece

    with serving(flow=flow) as to:
        to.server.offer(17, [rich_state()])
        with between(to, count) as port:
            assert bits(fetch(HOST, port, SECRET, 3, 17, wait_s=1, flow=flow)) == bits(rich_state())
        at = place % sizes[-1]

        def alter(before: int, piece: bytes) -> bytes:
            if before <= at < before + len(piece):
                altered = bytearray(piece)
                altered[at - before] ^= 1
                return bytes(altered)
            return piece

        with between(to, alter) as port, pytest.raises(StreamRefused):
            fetch(HOST, port, SECRET, 3, 17, wait_s=1, flow=flow)
        assert bits(to.fetch(flow=flow)) == bits(rich_state())


def test_training_goes_on_with_the_same_bits_while_strangers_bother_its_state_ports(tmp_path: Path) -> None:
    config, about = configured(tmp_path, "batchnorm")
    config = changed(config, steps=10_000)
    three = job(config, ranks=3, schedule="1f1b", counts=(3, 3, 2), **about)
    with RankGroup(config, 3) as group:
        ports = {number: position.port for number, position in group.each("position").items()}

        def bother() -> None:
            for round in range(3):
                group.wait_for(lambda reports, steps=2 * round: told_steps(reports) > steps)
                for port in ports.values():
                    with pytest.raises(StreamRefused, match="refused this rank's secret"):
                        fetch(HOST, port, b"another", 1, 1, wait_s=1)
                    with greeted(port, GROUP_SECRET) as (connected, line, seal, _):
                        _oversized(line, seal)
                        with suppress(ConnectionResetError):
                            assert connected.recv(1) == b"", "it must answer nothing"
            group.wait_for_log(lambda logged: len(logged) == 2 * 3 * len(ports))
            group.stop()

        # Every layer has a copy, whose base comes through the same ports meanwhile.
        ended = group.train(three, range(3), plan=with_standbys(three), meanwhile=bother)
        assert state_sha256(ended) == quiet_sha256(job(config, **about), ended)
        assert sorted(group.steps()) == list(range(1, ended[0].step + 1))
        assert not group.of(WarningReport)
        for number in ports:
            said = [text for rank, text in group.logged if rank == number]
            assert sum("refused: it does not know the job's secret" in text for text in said) == 3
            assert (
                sum("a request frame of 2147483648 bytes: at most 4096 may come" in text for text in said)
                == 3
            )


def told_steps(reports: list[Report]) -> int:
    return max((report.step for report in reports if isinstance(report, StepReport)), default=0)
