"""Measures what layer states that travel take of ranks that compute on the host: they share its cores and caches, and
what carries them to the network, with what is computed.

Each rank makes the profile's passes while the next rank's state arrives and its own leaves, as during a snapshot.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch

from planner.profile import Link
from workers.state.layer_state import LayerState
from workers.state_stream.frames import StateStreamError
from workers.state_stream.stream import StateServer, fetch
from workers.transport.channel import Channel

ROUNDS = 3
SHARE = 0.04
"""Of the time for measuring layers: how long passes without a state are timed in each round."""
LEAST_BYTES, MOST_BYTES = 4 << 20, 32 << 20
"""Size of the state. It is to take as much of a core as a pass, as far as that is known before."""
PRESUMED_S_PER_BYTE = 5e-9
LONGEST_S = 1.0
"""A state is smaller if it would be longer on its way."""
WAIT_S = 10.0
"""For the next rank's server."""


def probe_streams(
    channel: Channel,
    host: str,
    links: Sequence[Sequence[Link | None]],
    compute: Callable[[], None],
    budget_s: float,
) -> float | None:
    """Seconds that each byte of a state which leaves, or arrives, takes of this rank's computing; None where states do
    not arrive. All ranks call it together.

    In each of some rounds passes are made without a state and then with one. The least disturbed count: what else the
    host does only adds to either.

    Args:
        host: address at which this rank serves a state to the one before it.
        links: `links[source][target]`.
        compute: makes a pass through the layers, always the same.
        budget_s: how long the layers were measured.
    """
    rank, owner = channel.rank, (channel.rank + 1) % channel.size

    def alone() -> float:
        """Seconds of a pass."""
        passes, spent_s = _compute(channel, compute, lambda spent_s: spent_s < SHARE * budget_s)
        return spent_s / passes

    passes_s = [alone()]
    sizes = channel.all_gather(str(_state_bytes(passes_s[0], links[owner][rank])).encode())
    values = min(map(int, sizes)) // 4
    secret = secrets.token_bytes(32)
    server = StateServer(secret, host, busy=channel.sending)
    made: list[tuple[int, float]] = []
    try:
        server.keep(0, [LayerState(rank, "probe", {"values": torch.ones(values)}, {}, {}, {})])
        said = channel.all_gather(json.dumps([host, server.port, secret.hex()]).encode())
        address, port, key = json.loads(said[owner])
        bring = partial(fetch, address, port, bytes.fromhex(key), owner, 0, wait_s=WAIT_S)
        for _ in range(ROUNDS):
            passes_s.append(alone())
            bringing = _Bringing(bring)
            beside = _compute(channel, compute, lambda _, it=bringing: it.is_alive(), bringing.start)
            if bringing.came:
                made.append(beside)
        channel.all_gather(b"")  # nobody fetches any more
    finally:
        server.close()
    if not made:
        return None
    taken_s = min(spent_s - passes * min(passes_s) for passes, spent_s in made)
    return max(0.0, taken_s) / (2 * 4 * values)


class _Bringing(threading.Thread):
    """Fetches a state."""

    def __init__(self, bring: Callable[[], LayerState]) -> None:
        super().__init__(name="stream-probe", daemon=True)
        self._bring = bring
        self.came = False

    def run(self) -> None:
        with suppress(StateStreamError):
            self._bring()
            self.came = True


def _state_bytes(pass_s: float, incoming: Link | None) -> int:
    size = min(max(pass_s / (2 * PRESUMED_S_PER_BYTE), LEAST_BYTES), MOST_BYTES)  # it leaves, and arrives
    on_the_way_s = 0.0 if incoming is None else incoming.total_s(size)
    return int(size * min(1.0, LONGEST_S / max(on_the_way_s, LONGEST_S)))


def _compute(
    channel: Channel,
    compute: Callable[[], None],
    more: Callable[[float], bool],
    first: Callable[[], None] = lambda: None,
) -> tuple[int, float]:
    """(passes, seconds) of passes at the same time as all other ranks make theirs: at least one, and as long as there
    is `more` to do after so many seconds."""
    channel.all_gather(b"")
    begun_s = time.perf_counter()
    first()
    passes = 0
    while not passes or more(time.perf_counter() - begun_s):
        compute()
        passes += 1
    return passes, time.perf_counter() - begun_s
