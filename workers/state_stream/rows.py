"""Rows of kept activations by number, as one rank asks another one for them: what frozen layers made of samples.

Both halves. They are wanted for the step at hand, so they wait for nothing; whoever asks compares how long they take
with computing them. Knows no layer and no file.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from typing import Protocol

from workers.protocol.errors import StateStreamError
from workers.state_stream.fetching import Answers, connect
from workers.state_stream.frames import (
    MOST_BYTES,
    FrameKind,
    PeerGone,
    Seal,
    StreamRefused,
    WatchedSocket,
    ask,
)

ANSWER_S = 2.0
"""A peer that is silent for so long is not waited for."""
NAME_BYTES = 64
"""Longest name of a note, and of a mark."""
MOST = 1 << 31
"""Rows, and bytes of one, from which on none is kept: so each has its place in a file."""


class KeptRows(Protocol):
    """A rank's kept activations: see `workers.activation_cache.cache.ActivationCache`. Any thread may ask."""

    def raw(self, number: int, row_bytes: int, mark: bytes) -> bytes | None:
        """The row `number` of `row_bytes` bytes as it lies there, with its checksum and mark, `row_bytes` and some more
        bytes; None: none with `mark` does."""
        ...

    def noted(self, name: str) -> str | None:
        """The note `name`, None: there is none."""
        ...


@dataclass(frozen=True, kw_only=True)
class RowsWish:
    """A client's request: the payload of its `ROWS` frame."""

    row_bytes: int
    rows: tuple[tuple[int, bytes], ...] = ()
    """(number, mark)."""
    notes: tuple[str, ...] = ()
    """Hexadecimal names."""

    def encode(self) -> bytes:
        return json.dumps(
            [self.row_bytes, [[number, mark.hex()] for number, mark in self.rows], self.notes]
        ).encode()

    @staticmethod
    def decode(text: bytes | bytearray) -> RowsWish:
        """Raises:
        StreamRefused: `text` is none.
        """
        try:
            row_bytes, rows, notes = json.loads(text)
            wish = RowsWish(
                row_bytes=int(row_bytes),
                rows=tuple((int(number), bytes.fromhex(mark)) for number, mark in rows),
                notes=tuple(bytes.fromhex(name).hex() for name in notes),
            )
        except (ValueError, TypeError, OverflowError) as error:
            raise StreamRefused(f"a request for kept rows that is none: {error}") from error
        sizes = [*(len(mark) for _, mark in wish.rows), *(len(name) for name in wish.notes)]
        if not all(0 <= number < MOST for number in (wish.row_bytes, *(number for number, _ in wish.rows))):
            raise StreamRefused("a request for rows with numbers or sizes that none has")
        if max(sizes, default=0) > NAME_BYTES:
            raise StreamRefused("a request for rows with names that are too long")
        return wish


def answer_rows(line: WatchedSocket, seal: Seal, wish: RowsWish, kept: KeptRows | None) -> None:
    """Send what there is of `wish`: a header with the notes, then for each row one with its size, 0 if it is not there,
    and its chunks."""
    headers = chunks = 0
    notes = {} if kept is None else {name: kept.noted(name) for name in wish.notes}
    about = json.dumps({name: text for name, text in notes.items() if text is not None}).encode()
    if len(about) > MOST_BYTES[FrameKind.HEADER]:
        about = b"{}"
    line.write(seal.frame(FrameKind.HEADER, headers, about))
    for number, mark in wish.rows:
        row = None if kept is None else kept.raw(number, wish.row_bytes, mark)
        headers += 1
        line.write(seal.frame(FrameKind.HEADER, headers, json.dumps(0 if row is None else len(row)).encode()))
        rest = memoryview(row or b"")
        while rest:
            line.write(seal.frame(FrameKind.CHUNK, chunks, rest[: MOST_BYTES[FrameKind.CHUNK]]))
            rest, chunks = rest[MOST_BYTES[FrameKind.CHUNK] :], chunks + 1


def fetch_rows(
    host: str, port: int, secret: bytes, wish: RowsWish, stopped: threading.Event, until_s: float
) -> tuple[dict[str, str], list[bytearray | None]]:
    """The notes and the rows of `wish` from the `StateServer` at `host`:`port`, as they lie there: nobody has compared
    their checksums.

    Args:
        stopped: setting it ends the fetch within a fraction of a second, once it is connected.
        until_s: on the monotonic clock, when it ends at the latest.

    Raises:
        StateStreamError: the server is gone, is silent or slow, does not know the secret or sends nonsense.
    """
    where = f"kept activations from {host}:{port}"
    payload = wish.encode()
    if len(payload) > MOST_BYTES[FrameKind.ROWS]:
        raise StreamRefused(f"{where}: {len(wish.rows)} rows are too many for one request")
    wait_s = min(ANSWER_S, until_s - time.monotonic())
    if stopped.is_set() or wait_s <= 0:
        raise PeerGone(f"{where}: there is no time for them")
    try:
        with connect(host, port, wait_s) as connected:
            line = WatchedSocket(connected, stopped, ANSWER_S, until_s)
            seal, opener = ask(line, secret)
            line.write(seal.frame(FrameKind.ROWS, 0, payload))
            answers = Answers(line, opener)
            notes = _notes(_header(answers, opener, 0))
            rows, chunks = list[bytearray | None](), 0
            for number in range(1, len(wish.rows) + 1):
                size = _header(answers, opener, number)
                if not isinstance(size, int) or (size and not 0 < size - wish.row_bytes <= NAME_BYTES):
                    raise StreamRefused(
                        f"a row of {size} bytes came where one of {wish.row_bytes} was wanted"
                    )
                row = bytearray()
                for part, tag in answers.chunks(size):
                    opener.check(FrameKind.CHUNK, chunks, part, tag)
                    chunks += 1
                    row += part
                if len(row) != size:
                    raise StreamRefused(f"{len(row)} bytes came for a row of {size}")
                rows.append(row or None)
    except StateStreamError as error:
        raise type(error)(f"{where}: {error}") from error
    except OSError as error:
        raise PeerGone(f"{where}: {error.strerror or error}") from error
    return notes, rows


def _header(answers: Answers, opener: Seal, number: int) -> object:
    kind, payload, tag = answers.next([FrameKind.HEADER])
    opener.check(kind, number, payload, tag)
    try:
        return json.loads(payload)
    except ValueError as error:
        raise StreamRefused(f"a header that is none: {error}") from error


def _notes(found: object) -> dict[str, str]:
    if not isinstance(found, dict):
        raise StreamRefused("notes that are none came")
    texts: dict[object, object] = found
    return {name: text for name, text in texts.items() if isinstance(name, str) and isinstance(text, str)}
