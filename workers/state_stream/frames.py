"""The wire protocol of state streams: both ends prove that they know the job's secret, then exchange frames.

Every frame's length is checked before it is read, and each carries a keyed digest over its kind, number and
bytes. Knows no state, and never unpickles anything.
"""

from __future__ import annotations

import hmac
import json
import math
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from planner.shards import WHOLE, Piece, Shard
from workers.protocol.errors import StateStreamError
from workers.protocol.orders import StatePart

Bytes: TypeAlias = bytes | bytearray | memoryview

MAGIC = b"freshet state 3\n"
NONCE_BYTES = TAG_BYTES = 32
REFUSAL = bytes(TAG_BYTES)
"""Sent instead of the server's proof: the client's was wrong."""
HANDSHAKE_S = 5.0
"""Time that either end of a new connection may take to send its next message."""
SILENCE_S = 30.0
"""The stream gives up on a peer that sends too little or reads nothing for this long."""
POLL_S = 0.2
"""Seconds between two checks whether the stream was stopped."""

READ_AT_ONCE = 32 * 1024
"""A reader sleeps until this many bytes have arrived, or all if fewer remain. It is half the kernel's initial
receive buffer, so that more can arrive in the meantime."""

_HEAD = struct.Struct("!IB")
_NUMBER = struct.Struct("!BQI")


class StreamRefused(StateStreamError):
    """The peer does not know the secret, or violated the protocol."""


class PeerGone(StateStreamError):
    """The peer closed the connection or fell silent; or this end was closed."""


class Absent(StateStreamError):
    """The server is alive, but does not have the requested state."""


class FrameKind(IntEnum):
    """The kind of a frame."""

    REQUEST = 1
    """JSON: the requested layer, step, part and shard."""
    HEADER = 2
    """JSON: what the chunks hold."""
    CHUNK = 3
    WAIT = 4
    """Empty: the server is alive, but has to wait."""
    ABSENT = 5
    """Text: why the state will not arrive, or why no more changes will."""
    FOLLOW = 6
    """JSON: the layers that the peer follows; instead of a request."""
    CHANGE = 7
    """JSON: what a commit decided about their parcels, which came before it, as a state."""
    ROWS = 8
    """JSON: the kept activations that the peer asks for; instead of a request."""


MOST_BYTES = {
    FrameKind.REQUEST: 4096,
    FrameKind.HEADER: 4 << 20,
    FrameKind.CHUNK: 1 << 20,
    FrameKind.WAIT: 0,
    FrameKind.ABSENT: 4096,
    FrameKind.FOLLOW: 1 << 20,
    FrameKind.CHANGE: 1 << 20,
    FrameKind.ROWS: 1 << 20,
}
"""Largest payload of each kind of frame, in bytes."""


@dataclass(frozen=True)
class StateWish:
    """A client's request: the payload of its `REQUEST` frame."""

    layer: int
    step: int
    wait_s: float
    part: StatePart = StatePart.ALL
    shard: Shard = WHOLE
    fixed: bool = False
    """Whether with fixed parameters: whoever builds the layer has them."""

    @property
    def piece(self) -> Piece:
        return Piece(self.layer, self.shard)

    def encode(self) -> bytes:
        return json.dumps([self.layer, self.step, self.wait_s, self.part, self.shard, self.fixed]).encode()

    @staticmethod
    def decode(text: bytes | bytearray) -> StateWish:
        try:
            layer, step, wait_s, part, (number, of), fixed = json.loads(text)
            shard = Shard(int(number), int(of))
            wish = StateWish(int(layer), int(step), float(wait_s), StatePart(part), shard, bool(fixed))
        except (ValueError, TypeError) as error:
            raise StreamRefused(f"a request that is none: {error}") from error
        if not math.isfinite(wish.wait_s):
            raise StreamRefused("a request that waits for ever")
        return wish


class WatchedSocket:
    """A connected socket that limits the peer's silence and that another thread can stop.

    Args:
        stopped: once it is set, reads and writes raise `PeerGone`, after `POLL_S` at the latest.
        silence_s: how long the peer may take to send the next `READ_AT_ONCE` bytes or the rest of a frame, or
            to accept the next byte.
        until_s: on the monotonic clock: later, reads and writes raise `PeerGone`, after `POLL_S` at the latest.
    """

    def __init__(
        self,
        connected: socket.socket,
        stopped: threading.Event,
        silence_s: float,
        until_s: float = math.inf,
    ) -> None:
        self._socket = connected
        self.stopped = stopped
        self.silence_s = silence_s
        self._until_s = until_s
        self._wake_after = 1
        connected.settimeout(POLL_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def read(self, count: int) -> bytearray:
        """The next `count` bytes.

        Raises:
            PeerGone: they did not arrive.
        """
        data = bytearray(count)
        rest = memoryview(data)
        received_s = time.monotonic()
        while rest:
            self._check_open()
            try:
                self._sleep_until(min(len(rest), READ_AT_ONCE))
                got = self._socket.recv_into(rest)
            except TimeoutError:
                self._check_silence(received_s)
                continue
            except OSError as error:
                raise PeerGone(f"the connection broke: {error.strerror or error}") from error
            if not got:
                raise PeerGone("the other end closed the connection")
            rest = rest[got:]
            received_s = time.monotonic()
        # A tool that inspects all threads' frames may keep this one alive, and with it the view, which would
        # prevent resizing.
        rest.release()
        return data

    def _sleep_until(self, count: int) -> None:
        """Let the reader sleep until `count` bytes have arrived: waking for every packet would take the
        interpreter from training each time."""
        if count != self._wake_after:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            self._wake_after = count

    def write(self, parts: Sequence[Bytes]) -> None:
        """Raises:
        PeerGone: the peer did not accept them.
        """
        rest = [memoryview(part) for part in parts if len(part)]
        received_s = time.monotonic()
        while rest:
            self._check_open()
            try:
                sent = self._socket.sendmsg(rest)
            except TimeoutError:
                self._check_silence(received_s)
                continue
            except OSError as error:
                raise PeerGone(f"the connection broke: {error.strerror or error}") from error
            received_s = time.monotonic()
            while rest and sent >= len(rest[0]):
                sent -= len(rest.pop(0))
            if sent:
                rest[0] = rest[0][sent:]

    def cut(self) -> None:
        """End all reads and writes, here and at the other end; no byte leaves after this returns."""
        self.stopped.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _check_open(self) -> None:
        if self.stopped.is_set():
            raise PeerGone("this end was closed")
        if time.monotonic() > self._until_s:
            raise PeerGone("the other end takes too long")

    def _check_silence(self, received_s: float) -> None:
        if time.monotonic() - received_s > self.silence_s:
            raise PeerGone(f"the other end has been silent for {self.silence_s:g} s")


class Seal:
    """The keyed digests of one direction of one connection. Frames of each kind are numbered from 0."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def frame(self, kind: FrameKind, number: int, payload: Bytes = b"") -> tuple[Bytes, ...]:
        """A frame, as parts to write one after the other."""
        assert len(payload) <= MOST_BYTES[kind]
        return _HEAD.pack(len(payload), kind), payload, self._tag(kind, number, payload)

    def check(self, kind: FrameKind, number: int, payload: Bytes, tag: Bytes) -> None:
        """Raises:
        StreamRefused: `tag` does not match the frame.
        """
        if not hmac.compare_digest(self._tag(kind, number, payload), tag):
            raise StreamRefused(f"{kind.name.lower()} frame {number} was altered on the way")

    def _tag(self, kind: FrameKind, number: int, payload: Bytes) -> bytes:
        digest = hmac.new(self._key, _NUMBER.pack(kind, number, len(payload)), "sha256")
        digest.update(payload)
        return digest.digest()


def read_frame(line: WatchedSocket, allowed: Sequence[FrameKind]) -> tuple[FrameKind, bytearray, bytearray]:
    """The next frame's kind, payload and tag. The caller verifies the tag.

    Raises:
        StreamRefused: a frame of this kind is not allowed here, or it is too long.
        PeerGone: no frame arrived.
    """
    length, number = _HEAD.unpack(line.read(_HEAD.size))
    if number not in allowed:
        expected = " or ".join(str(int(kind)) for kind in allowed)
        raise StreamRefused(f"a frame of kind {number} came where {expected} was expected")
    kind = FrameKind(number)
    if length > MOST_BYTES[kind]:
        raise StreamRefused(
            f"a {kind.name.lower()} frame of {length} bytes: at most {MOST_BYTES[kind]} may come"
        )
    payload = line.read(length + TAG_BYTES)
    tag = payload[length:]
    del payload[length:]
    return kind, payload, tag


def ask(line: WatchedSocket, secret: bytes) -> tuple[Seal, Seal]:
    """The client's side of the handshake.

    Returns:
        Seals for what it sends and what it receives.

    Raises:
        StreamRefused: the server does not know the secret, or rejects our proof.
        PeerGone: the server closed the connection or fell silent.
    """
    mine = secrets.token_bytes(NONCE_BYTES)
    line.write([MAGIC, mine])
    nonces = mine + line.read(NONCE_BYTES)
    line.write([_proof(secret, b"client", nonces)])
    proof = line.read(TAG_BYTES)
    if proof == REFUSAL:
        raise StreamRefused("it refused this rank's secret: both must be of one job")
    if not hmac.compare_digest(proof, _proof(secret, b"server", nonces)):
        raise StreamRefused("it does not know the job's secret: another program listens there")
    return _seals(secret, nonces)


def answer(line: WatchedSocket, secret: bytes) -> tuple[Seal, Seal]:
    """The server's side of the handshake: it proves nothing to a client that has proved nothing.

    Returns:
        Seals for what it sends and what it receives.

    Raises:
        StreamRefused: the client does not know the secret, or speaks another protocol.
        PeerGone: the client closed the connection or fell silent.
    """
    if line.read(len(MAGIC)) != MAGIC:
        raise StreamRefused("it speaks something else than state streams")
    nonces = bytes(line.read(NONCE_BYTES))
    mine = secrets.token_bytes(NONCE_BYTES)
    line.write([mine])
    nonces += mine
    if not hmac.compare_digest(line.read(TAG_BYTES), _proof(secret, b"client", nonces)):
        with suppress(PeerGone):
            line.write([REFUSAL])
        raise StreamRefused("it does not know the job's secret")
    line.write([_proof(secret, b"server", nonces)])
    sent, received = _seals(secret, nonces)
    return received, sent


def _proof(secret: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, b"proof of " + role + nonces, "sha256")


def _seals(secret: bytes, nonces: bytes) -> tuple[Seal, Seal]:
    """The seals for the client's frames and for the server's."""
    client = hmac.digest(secret, b"frames of client" + nonces, "sha256")
    server = hmac.digest(secret, b"frames of server" + nonces, "sha256")
    return Seal(client), Seal(server)
