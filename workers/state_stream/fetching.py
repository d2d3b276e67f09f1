"""The receiving half of a state stream: verifies each chunk, then loads it while the kernel receives more."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from planner.shards import WHOLE, Piece, Shard
from workers.protocol.orders import Part
from workers.state.layer_state import LayerState
from workers.state_stream.encoding import Loading
from workers.state_stream.flow import Flow
from workers.state_stream.frames import (
    HANDSHAKE_S,
    SILENCE_S,
    Absent,
    Gone,
    Kind,
    Line,
    Refused,
    Seal,
    StateStreamError,
    Wish,
    ask,
    read_frame,
)

CONNECT_S = 5.0


def fetch(
    host: str,
    port: int,
    secret: bytes,
    layer: int,
    step: int,
    *,
    wait_s: float,
    part: Part = Part.ALL,
    shard: Shard = WHOLE,
    flow: Flow | None = None,
    stopped: threading.Event | None = None,
) -> LayerState:
    """The state of `layer` at `step` from the `StateServer` at `host`:`port`, in fresh CPU allocations.

    Args:
        wait_s: how long the server may wait until the state is offered.
        part: the part of the state to fetch; the rest of the returned state is empty.
        shard: of the layer.
        flow: whether to load while receiving; the server decides the rest.
        stopped: setting it ends the fetch within a fraction of a second.

    Raises:
        StateStreamError: the server is gone (`Gone`), does not know the secret or sends nonsense (`Refused`),
            or was not offered this state in time (`Absent`).
    """
    where = f"layer {layer} of step {step} from {host}:{port}"
    try:
        with connect(host, port) as connected:
            line = Line(connected, stopped or threading.Event(), HANDSHAKE_S)
            return _fetch(line, secret, Wish(layer, step, wait_s, part, shard), flow or Flow())
    except StateStreamError as error:
        raise type(error)(f"{where}: {error}") from error
    except OSError as error:
        raise Gone(f"{where}: {error.strerror or error}") from error


def connect(host: str, port: int) -> socket.socket:
    """Raises:
    Gone: nobody listens there.
    """
    try:
        return socket.create_connection((host, port), CONNECT_S)
    except OSError as error:
        raise Gone(f"cannot connect: {error.strerror or error}") from error


def _fetch(line: Line, secret: bytes, wish: Wish, flow: Flow) -> LayerState:
    # Not tagged: this direction carries almost nothing, and delayed acknowledgements would stall the stream.
    seal, opener = ask(line, secret)
    line.write(seal.frame(Kind.REQUEST, 0, wish.encode()))
    line.silence_s = SILENCE_S
    answers = Answers(line, opener)
    kind, payload, tag = answers.next([Kind.HEADER, Kind.ABSENT])
    opener.check(kind, 0, payload, tag)
    if kind is Kind.ABSENT:
        raise Absent(payload.decode())
    try:
        loading = Loading(payload)
        came = Piece(loading.state.layer, loading.state.shard)
        if (came, loading.step) != (wish.piece, wish.step):
            raise ValueError(f"{came} of step {loading.step} came")
        arriving = answers.chunks(loading.bytes)
        # Pipelined: the kernel receives while this thread loads; another thread would only cost wake-ups.
        load(loading, arriving if flow.pipelined else list(arriving), opener)
    except ValueError as error:
        raise Refused(str(error)) from error
    return loading.state


def load(
    loading: Loading, arrived: Iterable[tuple[bytearray, bytearray]], opener: Seal, first: int = 0
) -> int:
    """Verify chunks, and load them; returns the number of the next one.

    Args:
        first: the number of the first one.
    """
    number = first
    for chunk, tag in arrived:
        opener.check(Kind.CHUNK, number, chunk, tag)
        loading.load(chunk)
        number += 1
    return number


class Answers:
    """The frames from a server, without its keepalives.

    Args:
        waited: called for each keepalive.
    """

    def __init__(self, line: Line, opener: Seal, waited: Callable[[], None] = lambda: None) -> None:
        self._line = line
        self._opener = opener
        self._waited = waited
        self._signs = 0

    def next(self, allowed: Sequence[Kind]) -> tuple[Kind, bytearray, bytearray]:
        while True:
            kind, payload, tag = read_frame(self._line, [*allowed, Kind.WAIT])
            if kind is not Kind.WAIT:
                return kind, payload, tag
            self._opener.check(kind, self._signs, payload, tag)
            self._signs += 1
            self._waited()

    def chunks(self, total_bytes: int) -> Iterator[tuple[bytearray, bytearray]]:
        """(chunk, tag) as they arrive, not yet verified, until they make up `total_bytes`."""
        while total_bytes > 0:
            _, chunk, tag = self.next([Kind.CHUNK])
            total_bytes -= max(1, len(chunk))
            yield chunk, tag
