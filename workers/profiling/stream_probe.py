"""Measures what layer states that travel take of ranks that compute on the host: they share its cores and its caches
with what is computed, and the kernel carries them on the same cores.

Each rank makes the profile's passes while another rank's state arrives and its own leaves, as during a snapshot.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from planner.profile import Link
from workers.protocol.errors import StateStreamError
from workers.state.layer_state import LayerState
from workers.state_stream.frames import MOST_BYTES, FrameKind, Seal
from workers.state_stream.stream import StateServer, fetch
from workers.transport.channel import Channel

ROUNDS = 3
SHARE = 0.04
"""Share of the time for measuring layers in which each round times passes without a state."""
LONGEST_PASS_S = 3.0
"""Beside longer passes the state would not be noticed."""
LEAST_STATE_BYTES, MOST_STATE_BYTES = 4 << 20, 32 << 20
"""Size of the state. It is to take as much of a core as a pass, as far as that is known before."""
PRESUMED_S_PER_BYTE = 5e-9
LONGEST_S = 1.0
"""A state is smaller if it would be longer on its way."""
SLOWEST_STATE_BYTES = 1 << 20
"""If it would be smaller than that, the link is too slow to measure."""
WAIT_S = 10.0
"""For the other rank's server."""


class Traffic(NamedTuple):
    """Computing time that a rank loses to each byte that leaves it, or arrives, meanwhile."""

    stream_s_per_byte: float
    """Cost per byte of a layer's state."""
    socket_s_per_byte: float
    """Cost per byte of a message: without the digest of a state's bytes."""


def probe_streams(
    channel: Channel,
    host: str,
    machine: str,
    links: Sequence[Sequence[Link | None]],
    compute: Callable[[], None],
    budget_s: float,
) -> Traffic | None:
    """Costs that this rank found; None if states do not arrive, or passes or links are too slow to see them. All ranks
    call it together. States come from other machines, if there are any.

    In each of some rounds passes are made without a state and then with one. The least disturbed count: what else the
    host does only adds to either.

    Args:
        host: address at which this rank serves a state.
        machine: this rank's.
        links: `links[source][target]`.
        compute: makes a pass through the layers, always the same.
        budget_s: how long the layers were measured.
    """
    rank = channel.rank
    owner = (rank + shift([name.decode() for name in channel.all_gather(machine.encode())])) % channel.size

    def alone() -> float:
        """Seconds of a pass."""
        passes, spent_s = _compute(channel, compute, lambda spent_s: spent_s < SHARE * budget_s)
        return spent_s / passes

    passes_s = [alone()]
    size = state_bytes(passes_s[0], links[owner][rank])
    size = min(map(int, channel.all_gather(str(size).encode()))) // 4 * 4
    if not size:
        return None
    secret = secrets.token_bytes(32)
    server = StateServer(secret, host, busy=channel.sending)
    beside: list[tuple[int, float]] = []
    try:
        server.keep(0, [LayerState(rank, "probe", {"values": torch.ones(size // 4)}, {}, {}, {})])
        answers = channel.all_gather(json.dumps([host, server.port, secret.hex()]).encode())
        address, port, key = json.loads(answers[owner])
        for _ in range(ROUNDS):
            passes_s.append(alone())
            fetching = _Fetching(partial(fetch, address, port, bytes.fromhex(key), owner, 0, wait_s=WAIT_S))
            beside.append(
                _compute(channel, compute, lambda _, its=fetching: its.is_alive(), begin=fetching.start)
            )
            if not all(channel.all_gather(b"" if fetching.error else b"fetched")):
                if fetching.error is not None:
                    text = "not measured what layer states take that travel: %s; plans assume what is usual"
                    logging.getLogger(__name__).warning(text, fetching.error)
                return None
    finally:
        server.close()
    taken_s = min(spent_s - passes * min(passes_s) for passes, spent_s in beside)
    per_byte_s = max(0.0, taken_s) / (2 * size)
    return Traffic(per_byte_s, max(0.0, per_byte_s - _digest_s_per_byte(secret)))


def shift(machines: Sequence[str]) -> int:
    """Offset from a rank to the rank whose state it gets: the least with which most ranks get one from another machine
    than their own.

    Args:
        machines: by rank; two at least.
    """

    def apart(by: int) -> int:
        return sum(name != machines[(rank + by) % len(machines)] for rank, name in enumerate(machines))

    return max(range(1, len(machines)), key=apart)


def state_bytes(pass_s: float, incoming: Link | None) -> int:
    """Size of the state beside passes of `pass_s` over a link; 0 if one of them is too slow."""
    size = min(max(pass_s / (2 * PRESUMED_S_PER_BYTE), LEAST_STATE_BYTES), MOST_STATE_BYTES)  # there and back
    on_the_way_s = 0.0 if incoming is None else incoming.total_s(size)
    size *= min(1.0, LONGEST_S / max(on_the_way_s, LONGEST_S))
    return int(size) if size >= SLOWEST_STATE_BYTES and pass_s <= LONGEST_PASS_S else 0


class _Fetching(threading.Thread):
    """Fetches a state."""

    def __init__(self, fetch_it: Callable[[], LayerState]) -> None:
        super().__init__(name="stream-probe", daemon=True)
        self._fetch = fetch_it
        self.error: StateStreamError | None = None

    def run(self) -> None:
        try:
            self._fetch()
        except StateStreamError as error:
            self.error = error


def _compute(
    channel: Channel,
    compute: Callable[[], None],
    more: Callable[[float], bool],
    begin: Callable[[], None] = lambda: None,
) -> tuple[int, float]:
    """(passes, seconds) of passes at the same time as all other ranks make theirs: at least one, and as long as there
    is `more` to do after so many seconds.

    Args:
        begin: is called once all ranks are there.
    """
    channel.all_gather(b"")
    begun_s = time.perf_counter()
    begin()
    passes = 0
    while not passes or more(time.perf_counter() - begun_s):
        compute()
        passes += 1
    return passes, time.perf_counter() - begun_s


def _digest_s_per_byte(secret: bytes) -> float:
    seal, chunk = Seal(secret), bytes(MOST_BYTES[FrameKind.CHUNK])
    times: list[float] = []
    for number in range(ROUNDS):
        begun_s = time.perf_counter()
        seal.frame(FrameKind.CHUNK, number, chunk)
        times.append(time.perf_counter() - begun_s)
    return min(times) / len(chunk)
