"""Activations that another rank keeps: whole or not at all, and only while that is quicker than computing them."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from workers.activation_cache.elsewhere import AGAIN, TRIES, KeptElsewhere
from workers.activation_cache.slot_files import SlotFiles, Tier
from workers.state_stream.frames import MOST_BYTES, FrameKind, StreamRefused
from workers.state_stream.rows import RowsWish
from workers.state_stream.stream import StateServer

SECRET, HOST = b"the job's secret", "127.0.0.1"
KEY = b"k" * 16
LONG = 2 * MOST_BYTES[FrameKind.CHUNK] + 5
"""Bytes of a row that is more than a frame."""


def mark(number: int) -> bytes:
    return number.to_bytes(16, "little")


def row(number: int, length: int) -> list[memoryview]:
    """Its data in two tensors."""
    data = bytes((number + at) % 251 for at in range(length))
    return [memoryview(data)[:3], memoryview(data)[3:]]


@dataclass
class Asking:
    """A peer that counts what it is asked, and who asks it."""

    slots: SlotFiles
    asked: list[int] = field(default_factory=list)

    def raw(self, number: int, row_bytes: int, mark: bytes) -> bytes | None:
        self.asked.append(number)
        return self.slots.raw(number, row_bytes, mark)

    def noted(self, name: str) -> str | None:
        return self.slots.noted(name)


@dataclass
class Peer:
    kept: Asking
    server: StateServer
    folder: Path

    def elsewhere(self, secret: bytes = SECRET) -> KeptElsewhere:
        return KeptElsewhere([(HOST, self.server.port)], secret)


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    slots = SlotFiles([Tier(tmp_path, 10**9)], lambda text: None)
    kept = Asking(slots)
    server = StateServer(SECRET, HOST, busy=lambda: False, log=lambda text: None, rows=kept)
    with closing(server), closing(slots):
        yield Peer(kept, server, tmp_path)


def fetched(
    elsewhere: KeptElsewhere, numbers: list[int], length: int = 100, computed_s: float = 10.0
) -> list[bytes] | None:
    """The rows `numbers` as they come; None: not all of them do."""
    into = [bytearray(length) for _ in numbers]
    wanted = [
        (number, mark(number), [memoryview(data)[:3], memoryview(data)[3:]])
        for number, data in zip(numbers, into, strict=True)
    ]
    return [bytes(data) for data in into] if elsewhere.fetch(KEY, wanted, computed_s) else None


@pytest.mark.parametrize("length", [4, 100, LONG])
def test_rows_come_as_they_are(peer: Peer, length: int) -> None:
    for number in (0, 3, 7):
        assert peer.kept.slots.write(number, row(number, length), mark(number))
    elsewhere = peer.elsewhere()
    assert fetched(elsewhere, [7, 0], length) == [b"".join(row(number, length)) for number in (7, 0)]
    assert elsewhere.takes_s > 0.0
    assert fetched(elsewhere, [3, 5], length) is None


def test_other_marks_and_flipped_bits_are_not_there(peer: Peer) -> None:
    assert peer.kept.slots.write(1, row(1, 100), mark(2))
    assert fetched(peer.elsewhere(), [1]) is None
    assert peer.kept.slots.write(1, row(1, 100), mark(1))
    assert fetched(peer.elsewhere(), [1]) is not None
    with open(peer.folder / "100.slots", "r+b") as file:
        file.seek(120 + 50)
        (byte,) = file.read(1)
        file.seek(120 + 50)
        file.write(bytes([byte ^ 1]))
    assert fetched(peer.elsewhere(), [1]) is None


def test_nobody_who_does_not_know_the_secret_is_answered(peer: Peer) -> None:
    assert peer.kept.slots.write(1, row(1, 100), mark(1))
    assert fetched(peer.elsewhere(b"another secret"), [1]) is None
    assert peer.kept.asked == []


def test_what_comes_later_than_it_is_computed_is_hardly_asked_for_any_more(peer: Peer) -> None:
    assert peer.kept.slots.write(1, row(1, 100), mark(1))
    elsewhere = peer.elsewhere()
    for _ in range(TRIES):
        assert fetched(elsewhere, [1], computed_s=1e-9) is not None
    assert fetched(elsewhere, [1], computed_s=1e-9) is None
    assert len(peer.kept.asked) == TRIES
    assert fetched(elsewhere, [1]) is not None


def test_what_is_not_there_is_asked_for_now_and_then(peer: Peer) -> None:
    elsewhere = peer.elsewhere()
    for _ in range(3 * AGAIN):
        assert fetched(elsewhere, [1]) is None
    assert len(peer.kept.asked) == TRIES + 3
    assert peer.kept.slots.write(1, row(1, 100), mark(1))
    found = [fetched(elsewhere, [1]) is not None for _ in range(AGAIN + 3)]
    assert found == [False] * (AGAIN - 1) + [True] * 4


def test_what_is_there_by_half_is_not_fetched_in_vain_for_ever(peer: Peer) -> None:
    assert peer.kept.slots.write(1, row(1, 100), mark(1))
    elsewhere = peer.elsewhere()
    for _ in range(AGAIN - 1):
        assert fetched(elsewhere, [1, 2]) is None
    assert peer.kept.asked == [1, 2] * TRIES


class Slow(Asking):
    """A peer that answers each row late."""

    def raw(self, number: int, row_bytes: int, mark: bytes) -> bytes | None:
        time.sleep(0.2)
        return super().raw(number, row_bytes, mark)


def test_a_peer_that_sends_too_slowly_is_left_in_time(tmp_path: Path) -> None:
    with closing(SlotFiles([Tier(tmp_path, 10**9)], lambda text: None)) as slots:
        kept = Slow(slots)
        for number in range(50):
            assert slots.write(number, row(number, 100), mark(number))
        with closing(
            StateServer(SECRET, HOST, busy=lambda: False, log=lambda text: None, rows=kept)
        ) as server:
            elsewhere = KeptElsewhere([(HOST, server.port)], SECRET)
            assert fetched(elsewhere, [*range(50)], computed_s=0.01) is None
            # All of them take 10 s.
            assert len(kept.asked) < 50
            assert elsewhere._peers == []
            # The time that it took says nothing of who is next.
            two = KeptElsewhere([(HOST, server.port), (HOST, 1)], SECRET)
            assert fetched(two, [*range(50)], computed_s=0.01) is None
            assert two._peers == [(HOST, 1)]


def test_what_is_stopped_waits_for_nothing(tmp_path: Path) -> None:
    with closing(SlotFiles([Tier(tmp_path, 10**9)], lambda text: None)) as slots:
        kept = Slow(slots)
        with closing(
            StateServer(SECRET, HOST, busy=lambda: False, log=lambda text: None, rows=kept)
        ) as server:
            elsewhere = KeptElsewhere([(HOST, server.port)], SECRET)

            def stop() -> None:
                while not kept.asked:
                    time.sleep(0.01)
                elsewhere.stop()

            threading.Thread(target=stop).start()
            assert fetched(elsewhere, [*range(50)]) is None
            assert 0 < len(kept.asked) < 50


def test_a_peer_that_is_gone_is_not_asked_again(peer: Peer) -> None:
    assert peer.kept.slots.write(1, row(1, 100), mark(1))
    elsewhere = peer.elsewhere()
    assert fetched(elsewhere, [1]) is not None
    peer.server.close()
    assert fetched(elsewhere, [1]) is None
    assert elsewhere._peers == []


def test_notes_come_by_name(peer: Peer) -> None:
    peer.kept.slots.note("ab12", "what is kept")
    assert peer.elsewhere().notes(["ab12", "cd34"]) == {"ab12": "what is kept"}
    assert os.listdir(peer.folder) == ["ab12.json"]


def test_a_rank_that_keeps_nothing_says_so(tmp_path: Path) -> None:
    with closing(StateServer(SECRET, HOST, busy=lambda: False)) as server:
        elsewhere = KeptElsewhere([(HOST, server.port)], SECRET)
        assert elsewhere.notes(["ab12"]) == {}
        assert fetched(elsewhere, [1, 2]) is None


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[1, [], []",
        b"[-1, [], []]",
        b'[1, [[-1, "00"]], []]',
        b'[1, [[0, "zz"]], []]',
        b"[1e400, [], []]",
        b"[2147483648, [], []]",
        b'[1, [[1e30, "00"]], []]',
        b'[1, [], ["../ab"]]',
        b'[1, [[0, "' + b"00" * 65 + b'"]], []]',
        b"[1, [[0, 5]], []]",
    ],
)
def test_a_request_that_is_none_is_refused(text: bytes) -> None:
    with pytest.raises(StreamRefused):
        RowsWish.decode(text)


def test_a_request_comes_through() -> None:
    wish = RowsWish(row_bytes=7, rows=((3, b"abc"), (0, b"")), notes=("ab12",))
    assert RowsWish.decode(wish.encode()) == wish
