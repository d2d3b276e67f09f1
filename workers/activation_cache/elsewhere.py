"""Activations that other ranks keep, for a rank that has none of them yet: it reads for a first stage that was
elsewhere before, on a node that begins with an empty cache.

Asked for microbatch by microbatch, as a file would be read: what has come is kept here too, so each sample comes once.
Where that takes longer than computing, or little is there, hardly any more is asked for.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median

from workers.activation_cache.slot_files import take
from workers.protocol.errors import StateStreamError
from workers.state_stream.rows import ANSWER_S, RowsWish, fetch_rows

TRIES = 3
"""Microbatches that tell how long one takes, and whether anything is there."""
AGAIN = 32
"""Where asking does not pay, one of so many microbatches is asked for: others keep more as they train."""
PATIENCE = 4.0
"""A microbatch is waited for so many times as long as computing it takes, or for `ANSWER_S`, if that is longer."""


@dataclass(eq=False)
class _Tried:
    """Facts about the activations of one key."""

    costs_s: deque[float] = field(default_factory=lambda: deque(maxlen=TRIES))
    """Time spent on the newest microbatches that were asked for: one that did not come is computed too."""
    in_vain: int = 0
    """Microbatches in a row for which asking did not pay, whether they were asked for or not."""

    def pays(self, computed_s: float) -> bool:
        """Whether asking has paid so far, or is still to be tried."""
        return len(self.costs_s) < TRIES or median(self.costs_s) < computed_s

    def due(self, computed_s: float) -> bool:
        """Whether to ask for the next one."""
        if self.pays(computed_s):
            return True
        self.in_vain += 1
        return self.in_vain % AGAIN == 0

    def add(self, cost_s: float, computed_s: float) -> None:
        """Count one that was asked for. The first that paid again begins anew."""
        paid = self.pays(computed_s)
        if cost_s < computed_s:
            self.in_vain = 0
            if not paid:
                self.costs_s.clear()
        elif paid:  # else it is counted already
            self.in_vain += 1
        self.costs_s.append(cost_s)


class KeptElsewhere:
    """The peers of one generation. One thread asks for rows, and one, perhaps another, for notes.

    Args:
        peers: (host, port) of those that keep any.
        secret: the job's.
    """

    def __init__(self, peers: Sequence[tuple[str, int]], secret: bytes) -> None:
        self._peers = [*peers]
        self._secret = secret
        self._stopped = threading.Event()
        self._tried: dict[bytes, _Tried] = {}
        self._came_s = deque[float](maxlen=TRIES)
        """Times of the newest microbatches that came."""

    def stop(self) -> None:
        """Ask for nothing more, from any thread."""
        self._stopped.set()

    def notes(self, names: Sequence[str]) -> dict[str, str]:
        """Return what peers have noted under `names`: those that answer in time, all of them together."""
        found: dict[str, str] = {}
        until_s = time.monotonic() + ANSWER_S
        for peer in [*self._peers]:
            lacking = tuple(name for name in names if name not in found)
            if lacking:
                told = self._ask(peer, RowsWish(row_bytes=0, notes=lacking), until_s)[0]
                found |= {name: text for name, text in told.items() if name in lacking}
        return found

    def fetch(
        self,
        key: bytes,
        wanted: Sequence[tuple[int, bytes, Sequence[memoryview]]],
        computed_s: float,
    ) -> bool:
        """Read rows of `key` into buffers; whether all were there, whole. If not, the buffers have undefined content.

        Args:
            wanted: slot, mark and buffers of each.
            computed_s: time in which this rank would compute them.
        """
        tried = self._tried.setdefault(key, _Tried())
        if not self._peers or not tried.due(computed_s):
            return False
        begun_s = time.monotonic()
        there = self._all(wanted, begun_s + max(ANSWER_S, PATIENCE * computed_s))
        took_s = time.monotonic() - begun_s
        if there:
            self._came_s.append(took_s)
        tried.add(took_s if there else took_s + computed_s, computed_s)
        return there

    @property
    def takes_s(self) -> float:
        """Time in which a microbatch comes; 0: none has."""
        return median(self._came_s) if self._came_s else 0.0

    def _all(self, wanted: Sequence[tuple[int, bytes, Sequence[memoryview]]], until_s: float) -> bool:
        left = [*wanted]
        row_bytes = sum(part.nbytes for part in left[0][2])
        for peer in [*self._peers]:
            asked = RowsWish(row_bytes=row_bytes, rows=tuple((slot, mark) for slot, mark, _ in left))
            rows = self._ask(peer, asked, until_s)[1]
            left = [
                one
                for one, row in zip(left, rows, strict=True)
                if row is None or not take(row, one[2], one[1])
            ]
            if not left:
                return True
        return False

    def _ask(
        self, peer: tuple[str, int], wish: RowsWish, until_s: float
    ) -> tuple[dict[str, str], list[bytearray | None]]:
        nothing: tuple[dict[str, str], list[bytearray | None]] = {}, [None] * len(wish.rows)
        if time.monotonic() >= until_s:  # another peer took the time, which says nothing of this one
            return nothing
        try:
            return fetch_rows(*peer, self._secret, wish, self._stopped, until_s)
        except StateStreamError:  # it is gone, or too slow: training does not wait for it twice
            # Both threads may have waited for it.
            with suppress(ValueError):
                self._peers.remove(peer)
            return nothing
