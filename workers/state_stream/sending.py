"""The sending half of a state stream: serializes ahead, starts no chunk while training sends (DynPipe V-C3).

Knows neither the receiver nor the other offers.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from planner.codec import to_json
from workers.state.layer_state import LayerState
from workers.state_stream.encoding import chunks, header
from workers.state_stream.flow import Ahead, Flow, StreamPace, give_way
from workers.state_stream.following import CommittedChange
from workers.state_stream.frames import MOST_BYTES, Bytes, FrameKind, Seal, WatchedSocket

BULK = 2
"""Priority of the packets: Linux's TC_PRIO_BULK, which its default queue sends after all untagged traffic."""


@dataclass(eq=False, repr=False)
class Delivery:
    """The server's end of one connection, once the request has arrived."""

    _connected: socket.socket
    _line: WatchedSocket
    _seal: Seal
    """Seals what it sends."""
    _flow: Flow
    _busy: Callable[[], bool]
    """Whether training sends."""
    _sent: Counter[FrameKind] = field(default_factory=Counter, init=False)
    """Frames of each kind sent so far."""
    _pace: StreamPace = field(default_factory=StreamPace, init=False)

    def sign_of_life(self) -> None:
        self._line.write(self._next(FrameKind.WAIT))

    def decline(self, why: str) -> None:
        self._line.write(self._seal.frame(FrameKind.ABSENT, 0, why.encode()))

    def change(self, change: CommittedChange) -> None:
        """Send what a commit decided about the parcels that were delivered last."""
        self._line.write(self._next(FrameKind.CHANGE, to_json(change)))

    def deliver(self, state: LayerState, step: int) -> None:
        try:
            about = header(state, step)
            if len(about) > MOST_BYTES[FrameKind.HEADER]:
                raise ValueError(f"its {len(about)} bytes of names and shapes are more than a stream takes")
        except ValueError as error:
            self.decline(f"cannot travel: {error}")
            return
        frames = self._frames(about, state)
        if self._flow.pipelined:
            with Ahead(frames, self._flow.chunks_ahead, "state-serializer") as made:
                self._send(made)
        else:
            self._send(list(frames))

    def _frames(self, about: bytes, state: LayerState) -> Iterator[tuple[Bytes, ...]]:
        yield self._next(FrameKind.HEADER, about)
        for chunk in chunks(state, lambda: self._flow.chunk_bytes or self._pace.chunk_bytes()):
            yield self._next(FrameKind.CHUNK, chunk)

    def _next(self, kind: FrameKind, payload: Bytes = b"") -> tuple[Bytes, ...]:
        """The next frame of a kind, numbered."""
        number = self._sent[kind]
        self._sent[kind] += 1
        return self._seal.frame(kind, number, payload)

    def _send(self, frames: Iterable[tuple[Bytes, ...]]) -> None:
        pace, packets = self._pace, 0
        for frame in frames:
            arrived_s = time.monotonic()
            if self._flow.prioritized:
                if not give_way(
                    self._busy,
                    self._line.stopped,
                    tell=self.sign_of_life,
                    tell_every_s=self._flow.sign_of_life_s,
                ):
                    return
                if pace.packets_ahead() != packets:
                    packets = pace.packets_ahead()
                    bound_unsent(self._connected, packets)
            begun_s = time.monotonic()
            self._line.write(frame)
            pace.held_s += begun_s - arrived_s
            pace.writing_s += time.monotonic() - begun_s
            pace.written_bytes += sum(map(len, frame))


def prioritize(connected: socket.socket) -> None:
    """Let the network's queues send the packets of `connected` after all untagged ones (DynPipe V-C3)."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, BULK)


def bound_unsent(connected: socket.socket, packets: int) -> None:
    """Let only `packets` unsent packets wait in the kernel; the rest stays where it can be held back."""
    packet_bytes = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, packets * packet_bytes)
