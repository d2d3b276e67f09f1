"""Kernel counters of a TCP connection: how much of what was written has arrived, and what still waits.

A reading costs its user two system calls and the connection nothing.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

from workers.transport.connections import Socket, borrowed

_INFO = 11
"""TCP_INFO; Python has no name for it on all its versions."""
_SIZE = 192
"""Bytes of the kernel's `tcp_info` up to the last field that is read here: those of Linux 4.10."""
_MAX_PACING_RATE = 47
"""SO_MAX_PACING_RATE."""
_UNLIMITED = 2**64 - 1
UNCONFIRMED_PACKETS = 1
"""Packets whose acknowledgement the other end may delay, by up to 40 ms, when all have arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpState:
    """One reading. Times and bytes count from the connection's beginning."""

    acked_bytes: int
    """Bytes that the other end has acknowledged."""
    flying_packets: int
    """Sent and not acknowledged."""
    unsent_bytes: int
    """Written and not sent."""
    busy_s: float
    """Time with anything to send or to be acknowledged, to a tick of the kernel's clock (1 to 10 ms)."""
    refused_s: float
    """Time in which the other end's receive window limited sending."""
    round_trip_s: float
    """The kernel's smoothed estimate; right after the handshake, what that took."""

    @property
    def waiting(self) -> bool:
        """Whether bytes wait for the link, beyond those whose acknowledgement may be held back."""
        return self.unsent_bytes > 0 or self.flying_packets > UNCONFIRMED_PACKETS


def tcp_state(connection: socket.socket) -> TcpState | None:
    """The state of a connection; None where the kernel does not tell all of it."""
    raw = connection.getsockopt(socket.IPPROTO_TCP, _INFO, _SIZE)
    if len(raw) < _SIZE:
        return None
    acked, unsent, busy_us, refused_us = (
        *struct.unpack_from("Q", raw, 120),
        *struct.unpack_from("I", raw, 144),
        *struct.unpack_from("QQ", raw, 168),
    )
    (flying,) = struct.unpack_from("I", raw, 24)
    (round_trip_us,) = struct.unpack_from("I", raw, 68)
    return TcpState(
        acked_bytes=acked,
        flying_packets=flying,
        unsent_bytes=unsent,
        busy_s=busy_us * 1e-6,
        refused_s=refused_us * 1e-6,
        round_trip_s=round_trip_us * 1e-6,
    )


def state_of(one: Socket) -> TcpState | None:
    """The state of another library's connection; None if it is closed or the kernel does not tell."""
    try:
        with borrowed(one) as connection:
            return tcp_state(connection)
    except OSError:
        return None


def pace(one: Socket, bytes_per_s: float | None) -> bool:
    """Have the kernel send over a connection at no more than `bytes_per_s`, None: as fast as it can; return whether it
    will."""
    rate = _UNLIMITED if bytes_per_s is None else max(1, int(bytes_per_s))
    try:
        with borrowed(one) as connection:
            connection.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, struct.pack("Q", rate))
    except OSError:
        return False
    return True
