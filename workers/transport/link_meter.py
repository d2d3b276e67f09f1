"""Speed of a rank's messages, by the kernel's account of its connections; `docs/decisions/link-times.md`.

Now and then a message is followed: how many bytes the other end acknowledges while more of them wait. And now and then,
while a connection is idle, a handshake with that rank's kernel tells the round trip. No clock of another machine is
read, no message is added to a stream, and the thread that trains reads one connection's state for each message that is
followed.
"""

from __future__ import annotations

import queue
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby

from planner.observed import LinkTime
from workers.transport.peers import PeerRoute, Peers
from workers.transport.tcp_state import TcpState, state_of, tcp_state

EVERY_S = 1.0
"""Between two messages that are followed to one rank, and between two handshakes with it."""
LARGE_S = 5.0
"""Time to wait for a message at least half as large as the largest one."""
LEAST_BYTES = 8192
"""Smallest message that is followed."""
PAUSES_S = tuple(0.0005 * 1.5**look for look in range(15))
"""Between two looks at a message: 0.4 s in all."""
LEAST_S = 0.002
"""Shortest time in which bytes passed that is a measurement."""
TICK_S = 0.01
"""Largest error of the kernel's account of busy time."""
ABOUT_THE_SAME = 1.5
"""Factor between two rates that confirm each other."""
HANDSHAKES = 4
"""Newest handshakes of which the fastest counts: others waited behind messages."""
PATIENCE_S = 1.0
"""For a handshake."""
_NO_LINGERING = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class ConnectionReading:
    """At a connection."""

    at_s: float
    state: TcpState


@dataclass(frozen=True, slots=True)
class _Followed:
    target: int
    way: PeerRoute
    size: int
    begun: ConnectionReading


class LinkMeter:
    """Measures one rank's connections, in a thread of its own until `close`.

    Args:
        peers: finds them.
        clock: of seconds.
    """

    def __init__(self, peers: Peers, clock: Callable[[], float] = time.perf_counter) -> None:
        self._peers = peers
        self._clock = clock
        self._ways: dict[int, PeerRoute | None] = {}
        """Ways to the ranks that are sent to; None: not known yet."""
        self._due_s: dict[int, float] = {}
        self._largest: dict[int, int] = {}
        """Bytes of the largest recent message, by target."""
        self._shaken_s: dict[int, float] = {}
        self._round_trips: dict[int, deque[float]] = {}
        self._found: dict[int, LinkTime] = {}
        self._lock = threading.Lock()
        self._asked: queue.SimpleQueue[_Followed | None] = queue.SimpleQueue()
        self._closed = False
        self.thread = threading.Thread(target=self._run, name="link meter", daemon=True)
        self.thread.start()

    def sending(self, target: int, size: int) -> None:
        """A message of `size` bytes is about to be sent. Call it from the thread that trains; it waits for nothing."""
        way = self._ways.setdefault(target, None)
        if way is None or size < LEAST_BYTES:
            return
        now_s = self._clock()
        since_s = now_s - self._due_s.get(target, 0.0)
        # Large messages tell the rate best: what a link passes at once, and its latency, count for little.
        if since_s > LARGE_S:
            self._largest[target] = 0
        largest = self._largest[target] = max(size, self._largest.get(target, 0))
        if since_s < 0 or size < largest / 2:
            return
        self._due_s[target] = now_s + EVERY_S
        state = state_of(way.connection)
        if state is not None:
            self._asked.put(_Followed(target, way, size, ConnectionReading(now_s, state)))

    def drain(self) -> tuple[LinkTime, ...]:
        """Link times measured since the last call, the newest of each link."""
        with self._lock:
            found, self._found = self._found, {}
        return tuple(found.values())

    def close(self) -> None:
        """End the thread, soon."""
        self._closed = True
        self._asked.put(None)

    def _run(self) -> None:
        # A store that is gone ends the measurement: so does its generation.
        with suppress(RuntimeError, OSError):
            while not self._closed:
                try:
                    followed = self._asked.get(timeout=EVERY_S)
                except queue.Empty:
                    followed = None
                if followed is not None:
                    self._follow(followed)
                self._peers.answer()
                self._look_around()
        self._peers.close()

    def _look_around(self) -> None:
        """Find the ways to new neighbours, and shake hands with those whose turn it is."""
        for target in list(self._ways):
            if self._closed:
                return
            way = self._ways[target] = self._ways[target] or self._peers.way(target)
            now_s = self._clock()
            if way is not None and now_s - self._shaken_s.get(target, -EVERY_S) >= EVERY_S:
                state = state_of(way.connection)
                # Behind a message the handshake would tell how long that takes.
                if state is not None and not state.waiting:
                    self._shaken_s[target] = now_s
                    took_s = _shake_hands(way.door)
                    if took_s is not None:
                        self._round_trips.setdefault(target, deque(maxlen=HANDSHAKES)).append(took_s)
                        self._note(target, None)

    def _follow(self, message: _Followed) -> None:
        looks = [message.begun]
        for pause_s in PAUSES_S:
            time.sleep(pause_s)
            state = state_of(message.way.connection)
            if self._closed or state is None:
                return
            looks.append(ConnectionReading(self._clock(), state))
            arrived = state.acked_bytes - message.begun.state.acked_bytes
            if arrived >= message.size and not state.waiting:
                break
        passed = passage(looks, message.size)
        if passed is not None:
            self._note(message.target, passed)

    def _note(self, target: int, passed: tuple[int, float, bool] | None) -> None:
        with self._lock:
            before = self._found.get(target)
            if passed is None and before is not None:
                passed = before.size_bytes, before.seconds, before.at_least
            size, seconds, at_least = passed or (0, 0.0, True)
            trips = self._round_trips.get(target)
            self._found[target] = LinkTime(
                target=target,
                size_bytes=size,
                seconds=seconds,
                at_least=at_least,
                round_trip_s=min(trips) if trips else None,
            )


def passage(looks: Sequence[ConnectionReading], size: int) -> tuple[int, float, bool] | None:
    """(bytes that passed, seconds, whether the link may be faster) of a message that was looked at again and again;
    None: it tells nothing.

    The rate counts while bytes wait for the link, and the other end has room.

    Args:
        looks: the first before it was sent.
    """
    begun = looks[0]
    gone = next(
        (look for look in looks[1:] if look.state.acked_bytes - begun.state.acked_bytes >= size), None
    )
    bound = None
    if gone is not None:
        bound = gone.state.acked_bytes - begun.state.acked_bytes, gone.at_s - begun.at_s, True
    runs = [list(run) for waiting, run in groupby(looks, key=lambda look: look.state.waiting) if waiting]
    longest = max(runs, key=lambda run: run[-1].at_s - run[0].at_s, default=[])
    if not longest:
        return bound
    first, last = longest[0], longest[-1]
    seconds = last.at_s - first.at_s
    passed = last.state.acked_bytes - first.state.acked_bytes
    idle_s = seconds - (last.state.busy_s - first.state.busy_s)
    refused_s = last.state.refused_s - first.state.refused_s
    if seconds < LEAST_S or not passed or idle_s > TICK_S or refused_s > seconds / 2:
        return bound
    if bound is not None and bound[0] / bound[1] > passed / seconds:
        # A connection begins slowly. What it does for a while counts if the whole message shows about the same.
        return bound[0], bound[1], bound[0] / bound[1] > ABOUT_THE_SAME * passed / seconds
    return passed, seconds, False


def _shake_hands(door: tuple[str, int]) -> float | None:
    """Seconds of a handshake with the kernel at `door`, by this one's own account; None: it does not answer."""
    family = socket.AF_INET6 if ":" in door[0] else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(PATIENCE_S)
        # Nothing of it stays behind when it is closed.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGERING)
        connection.connect(door)
        state = tcp_state(connection)
        return None if state is None or state.round_trip_s <= 0 else state.round_trip_s
    return None
