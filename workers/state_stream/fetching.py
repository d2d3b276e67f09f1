"""The receiving half of a state stream: verifies each chunk, then loads it while the kernel receives more."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from planner.shards import WHOLE, Piece, Shard
from workers.protocol.errors import StateStreamError
from workers.protocol.orders import StatePart
from workers.state.layer_state import LayerState
from workers.state_stream.encoding import PartialState
from workers.state_stream.flow import Flow
from workers.state_stream.frames import (
    HANDSHAKE_S,
    SILENCE_S,
    Absent,
    FrameKind,
    PeerGone,
    Seal,
    StateWish,
    StreamRefused,
    WatchedSocket,
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
    part: StatePart = StatePart.ALL,
    shard: Shard = WHOLE,
    fixed: bool = False,
    flow: Flow | None = None,
    stopped: threading.Event | None = None,
) -> LayerState:
    """The state of `layer` at `step` from the `StateServer` at `host`:`port`, in fresh CPU allocations.

    Args:
        wait_s: how long the server may wait until the state is offered.
        part: the part of the state to fetch; the rest of the returned state is empty.
        shard: of the layer.
        fixed: whether with fixed parameters, which whoever builds the layer has.
        flow: whether to load while receiving; the server decides the rest.
        stopped: setting it ends the fetch within a fraction of a second.

    Raises:
        StateStreamError: the server is gone (`PeerGone`), does not know the secret or sends nonsense (`StreamRefused`),
            or was not offered this state in time (`Absent`).
    """
    where = f"layer {layer} of step {step} from {host}:{port}"
    try:
        with connect(host, port) as connected:
            line = WatchedSocket(connected, stopped or threading.Event(), HANDSHAKE_S)
            return _fetch(line, secret, StateWish(layer, step, wait_s, part, shard, fixed), flow or Flow())
    except StateStreamError as error:
        raise type(error)(f"{where}: {error}") from error
    except OSError as error:
        raise PeerGone(f"{where}: {error.strerror or error}") from error


def connect(host: str, port: int, wait_s: float = CONNECT_S) -> socket.socket:
    """Raises:
    PeerGone: nobody listens there.
    """
    try:
        return socket.create_connection((host, port), wait_s)
    except OSError as error:
        raise PeerGone(f"cannot connect: {error.strerror or error}") from error


def _fetch(line: WatchedSocket, secret: bytes, wish: StateWish, flow: Flow) -> LayerState:
    # Not tagged: this direction carries almost nothing, and delayed acknowledgements would stall the stream.
    seal, opener = ask(line, secret)
    line.write(seal.frame(FrameKind.REQUEST, 0, wish.encode()))
    line.silence_s = SILENCE_S
    answers = Answers(line, opener)
    kind, payload, tag = answers.next([FrameKind.HEADER, FrameKind.ABSENT])
    opener.check(kind, 0, payload, tag)
    if kind is FrameKind.ABSENT:
        raise Absent(payload.decode())
    try:
        loading = PartialState(payload)
        came = Piece(loading.state.layer, loading.state.shard)
        if (came, loading.step) != (wish.piece, wish.step):
            raise ValueError(f"{came} of step {loading.step} came")
        arriving = answers.chunks(loading.bytes)
        # Pipelined: the kernel receives while this thread loads; another thread would only cost wake-ups.
        load(loading, arriving if flow.pipelined else list(arriving), opener)
    except ValueError as error:
        raise StreamRefused(str(error)) from error
    return loading.state


def load(
    loading: PartialState, arrived: Iterable[tuple[bytearray, bytearray]], opener: Seal, first: int = 0
) -> int:
    """Verify chunks, and load them; returns the number of the next one.

    Args:
        first: the number of the first one.
    """
    number = first
    for chunk, tag in arrived:
        opener.check(FrameKind.CHUNK, number, chunk, tag)
        loading.load(chunk)
        number += 1
    return number


class Answers:
    """The frames from a server, without its keepalives.

    Args:
        waited: called for each keepalive.
    """

    def __init__(self, line: WatchedSocket, opener: Seal, waited: Callable[[], None] = lambda: None) -> None:
        self._line = line
        self._opener = opener
        self._waited = waited
        self._signs = 0

    def next(self, allowed: Sequence[FrameKind]) -> tuple[FrameKind, bytearray, bytearray]:
        while True:
            kind, payload, tag = read_frame(self._line, [*allowed, FrameKind.WAIT])
            if kind is not FrameKind.WAIT:
                return kind, payload, tag
            self._opener.check(kind, self._signs, payload, tag)
            self._signs += 1
            self._waited()

    def chunks(self, total_bytes: int) -> Iterator[tuple[bytearray, bytearray]]:
        """(chunk, tag) as they arrive, not yet verified, until they make up `total_bytes`."""
        while total_bytes > 0:
            _, chunk, tag = self.next([FrameKind.CHUNK])
            total_bytes -= max(1, len(chunk))
            yield chunk, tag
