"""The wire of state streams: a handshake in which both ends prove that they know the job's secret, then frames.

Every frame is bounded before it is read and carries a keyed digest over its kind, its number and its bytes. Knows no
state, and never unpickles anything.
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

from workers.protocol import Part
from workers.transport.channel import ChannelError

Bytes: TypeAlias = bytes | bytearray | memoryview

MAGIC = b"freshet state 1\n"
NONCE_BYTES = TAG_BYTES = 32
REFUSAL = bytes(TAG_BYTES)
"""In the place of the server's proof: the client's was wrong."""
HANDSHAKE_S = 5.0
"""How long either end of a new connection may take to say the next thing."""
SILENCE_S = 30.0
"""A peer that says too little or takes nothing for so long is given up."""
POLL_S = 0.2
"""Between two looks whether the stream was given up."""

READ_AT_ONCE = 32 * 1024
"""Bytes that a reader lets arrive before it is woken, if so many are still to come: half of what the system takes in at
first, so that others can come meanwhile."""

_HEAD = struct.Struct("!IB")
_NUMBER = struct.Struct("!BQI")


class StateStreamError(ChannelError):
    """A layer's state did not come: its source is gone, refuses, has not got it, or sent something else."""


class Refused(StateStreamError):
    """The peer does not know the secret, or sent what no peer of ours sends."""


class Gone(StateStreamError):
    """The peer closed the connection or fell silent; or this end was closed."""


class Absent(StateStreamError):
    """The server lives, but has not got what was asked for."""


class Kind(IntEnum):
    """What a frame is."""

    REQUEST = 1
    """JSON: which layer and step, and how much of it."""
    HEADER = 2
    """JSON: what the chunks hold."""
    CHUNK = 3
    WAIT = 4
    """Empty: the server is alive, but has to wait."""
    ABSENT = 5
    """Text: why nothing will come."""


MOST_BYTES = {
    Kind.REQUEST: 4096,
    Kind.HEADER: 4 << 20,
    Kind.CHUNK: 1 << 20,
    Kind.WAIT: 0,
    Kind.ABSENT: 4096,
}
"""Bytes that a frame of a kind may have."""


@dataclass(frozen=True)
class Wish:
    """What a client asks for: the payload of its request."""

    layer: int
    step: int
    wait_s: float
    part: Part = Part.ALL

    def encode(self) -> bytes:
        return json.dumps([self.layer, self.step, self.wait_s, self.part]).encode()

    @staticmethod
    def decode(text: bytes | bytearray) -> Wish:
        try:
            layer, step, wait_s, part = json.loads(text)
            wish = Wish(int(layer), int(step), float(wait_s), Part(part))
        except (ValueError, TypeError) as error:
            raise Refused(f"a request that is none: {error}") from error
        if not math.isfinite(wish.wait_s):
            raise Refused("a request that waits for ever")
        return wish


class Line:
    """A connected socket with a bound on silence, which another thread can give up.

    Args:
        stopped: once it is set, reads and writes raise `Gone`, after `POLL_S` at the latest.
        silence_s: how long the peer may take to send the next `READ_AT_ONCE` bytes, or what is left of a frame, or to
            take the next byte.
    """

    def __init__(self, connected: socket.socket, stopped: threading.Event, silence_s: float) -> None:
        self._socket = connected
        self.stopped = stopped
        self.silence_s = silence_s
        self._wake_after = 1
        connected.settimeout(POLL_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def read(self, count: int) -> bytearray:
        """The next `count` bytes.

        Raises:
            Gone: they did not come.
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
                raise Gone(f"the connection broke: {error.strerror or error}") from error
            if not got:
                raise Gone("the other end closed the connection")
            rest = rest[got:]
            received_s = time.monotonic()
        # Who looks at all threads' frames may keep this one, and with it the view, which would fix the length.
        rest.release()
        return data

    def _sleep_until(self, count: int) -> None:
        """Let the reader sleep until `count` bytes are there: with every packet it would take the interpreter from
        training."""
        if count != self._wake_after:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            self._wake_after = count

    def write(self, parts: Sequence[Bytes]) -> None:
        """Raises:
        Gone: the peer did not take them.
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
                raise Gone(f"the connection broke: {error.strerror or error}") from error
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
            raise Gone("this end was closed")

    def _check_silence(self, received_s: float) -> None:
        if time.monotonic() - received_s > self.silence_s:
            raise Gone(f"the other end has been silent for {self.silence_s:g} s")


class Seal:
    """The keyed digests of one direction of one connection. Frames of each kind are numbered from 0."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def frame(self, kind: Kind, number: int, payload: Bytes = b"") -> tuple[Bytes, ...]:
        """A frame, in parts to be written one after the other."""
        assert len(payload) <= MOST_BYTES[kind]
        return _HEAD.pack(len(payload), kind), payload, self._tag(kind, number, payload)

    def check(self, kind: Kind, number: int, payload: Bytes, tag: Bytes) -> None:
        """Raises:
        Refused: `tag` is not that of the frame.
        """
        if not hmac.compare_digest(self._tag(kind, number, payload), tag):
            raise Refused(f"{kind.name.lower()} frame {number} was altered on the way")

    def _tag(self, kind: Kind, number: int, payload: Bytes) -> bytes:
        digest = hmac.new(self._key, _NUMBER.pack(kind, number, len(payload)), "sha256")
        digest.update(payload)
        return digest.digest()


def read_frame(line: Line, allowed: Sequence[Kind]) -> tuple[Kind, bytearray, bytearray]:
    """The next frame's kind, payload and tag, which is still to be checked.

    Raises:
        Refused: no such frame may come here, or none so long.
        Gone: none came.
    """
    length, number = _HEAD.unpack(line.read(_HEAD.size))
    if number not in allowed:
        expected = " or ".join(str(int(kind)) for kind in allowed)
        raise Refused(f"a frame of kind {number} came where {expected} was expected")
    kind = Kind(number)
    if length > MOST_BYTES[kind]:
        raise Refused(f"a {kind.name.lower()} frame of {length} bytes: at most {MOST_BYTES[kind]} may come")
    payload = line.read(length + TAG_BYTES)
    tag = payload[length:]
    del payload[length:]
    return kind, payload, tag


def ask(line: Line, secret: bytes) -> tuple[Seal, Seal]:
    """The client's side of the handshake.

    Returns:
        Seals for what it sends and what it receives.

    Raises:
        Refused: the server does not know the secret, or thinks that we do not.
        Gone: the server went away.
    """
    mine = secrets.token_bytes(NONCE_BYTES)
    line.write([MAGIC, mine])
    nonces = mine + line.read(NONCE_BYTES)
    line.write([_proof(secret, b"client", nonces)])
    proof = line.read(TAG_BYTES)
    if proof == REFUSAL:
        raise Refused("it refused this rank's secret: both must be of one job")
    if not hmac.compare_digest(proof, _proof(secret, b"server", nonces)):
        raise Refused("it does not know the job's secret: another program listens there")
    return _seals(secret, nonces)


def answer(line: Line, secret: bytes) -> tuple[Seal, Seal]:
    """The server's side of the handshake: it proves nothing to a client that has proved nothing.

    Returns:
        Seals for what it sends and what it receives.

    Raises:
        Refused: the client does not know the secret, or speaks something else.
        Gone: the client went away.
    """
    if line.read(len(MAGIC)) != MAGIC:
        raise Refused("it speaks something else than state streams")
    nonces = bytes(line.read(NONCE_BYTES))
    mine = secrets.token_bytes(NONCE_BYTES)
    line.write([mine])
    nonces += mine
    if not hmac.compare_digest(line.read(TAG_BYTES), _proof(secret, b"client", nonces)):
        with suppress(Gone):
            line.write([REFUSAL])
        raise Refused("it does not know the job's secret")
    line.write([_proof(secret, b"server", nonces)])
    sent, received = _seals(secret, nonces)
    return received, sent


def _proof(secret: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, b"proof of " + role + nonces, "sha256")


def _seals(secret: bytes, nonces: bytes) -> tuple[Seal, Seal]:
    """Of the client's frames, and of the server's."""
    client = hmac.digest(secret, b"frames of client" + nonces, "sha256")
    server = hmac.digest(secret, b"frames of server" + nonces, "sha256")
    return Seal(client), Seal(server)
