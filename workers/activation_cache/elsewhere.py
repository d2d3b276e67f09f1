"""Activations that other ranks keep, for a rank that has none of them yet: it reads for a first stage that was
elsewhere before, on a node that begins with an empty cache.

Asked for microbatch by microbatch, ahead of the step, as a file would be read: what has come is kept here too, so each
sample comes once. Where that takes longer than computing, or nobody has anything, no more is asked for.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from workers.activation_cache.slot_files import take
from workers.state_stream.frames import StateStreamError
from workers.state_stream.rows import RowsWish, fetch_rows

TRIES = 3
"""Microbatches that tell how long one takes, and whether anything is there."""
AGAIN = 32
"""One of so many microbatches that were not there is asked for: others keep more as they train."""


@dataclass(eq=False)
class _Tried:
    """Facts about the activations of one key."""

    takes_s: deque[float] = field(default_factory=lambda: deque(maxlen=TRIES))
    """The newest microbatches that came."""
    in_vain: int = 0
    """Microbatches in a row that did not come, whether they were asked for or not."""


class KeptElsewhere:
    """The peers of one generation. One thread asks for rows; `notes` is called before it does.

    Args:
        peers: (host, port) of those that keep any.
        secret: the job's.
    """

    def __init__(self, peers: Sequence[tuple[str, int]], secret: bytes) -> None:
        self._peers = [*peers]
        self._secret = secret
        self._stopped = threading.Event()
        self._tried: dict[bytes, _Tried] = {}

    def stop(self) -> None:
        """Ask for nothing more, from any thread."""
        self._stopped.set()

    def notes(self, names: Sequence[str]) -> dict[str, str]:
        """Return what peers have noted under `names`."""
        found: dict[str, str] = {}
        for peer in [*self._peers]:
            lacking = tuple(name for name in names if name not in found)
            if lacking:
                found |= self._ask(peer, RowsWish(row_bytes=0, notes=lacking))[0]
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
        if not self._peers or (len(tried.takes_s) == TRIES and median(tried.takes_s) >= computed_s):
            return False
        tried.in_vain += 1
        if tried.in_vain > TRIES and tried.in_vain % AGAIN:
            return False
        begun_s, left = time.perf_counter(), [*wanted]
        row_bytes = sum(part.nbytes for part in left[0][2])
        for peer in [*self._peers]:
            asked = RowsWish(row_bytes=row_bytes, rows=tuple((slot, mark) for slot, mark, _ in left))
            rows = self._ask(peer, asked)[1]
            left = [
                one
                for one, row in zip(left, rows, strict=True)
                if row is None or not take(row, one[2], one[1])
            ]
            if not left:
                tried.takes_s.append(time.perf_counter() - begun_s)
                tried.in_vain = 0
                return True
        return False

    def takes_s(self, key: bytes) -> float:
        """Time in which a microbatch comes; 0: none has."""
        tried = self._tried.get(key)
        return median(tried.takes_s) if tried is not None and tried.takes_s else 0.0

    def _ask(self, peer: tuple[str, int], wish: RowsWish) -> tuple[dict[str, str], list[bytearray | None]]:
        try:
            return fetch_rows(*peer, self._secret, wish, self._stopped)
        except StateStreamError:  # it is gone, or too slow: training does not wait for it twice
            if peer in self._peers:
                self._peers.remove(peer)
            return {}, [None] * len(wish.rows)
