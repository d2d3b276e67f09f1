"""Bounds how often a client may do something, and how much of it at once. Pure: the caller brings the clock."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

MOST_CLIENTS = 10_000


@dataclass(eq=False)
class RateLimit:
    """At most `burst` at once, and `per_s` per second in the long run, for each client."""

    per_s: float
    burst: int
    _left: OrderedDict[str, tuple[float, float]] = field(init=False, default_factory=OrderedDict)
    """Client -> (how many are left, at that time); the longest idle first."""

    def wait_s(self, client: str, now_s: float) -> float:
        """Take one; return 0, or how long to wait because none is left."""
        left, then_s = self._left.pop(client, (float(self.burst), now_s))
        left = min(float(self.burst), left + (now_s - then_s) * self.per_s)
        granted = left >= 1.0
        self._left[client] = (left - 1.0 if granted else left, now_s)
        if len(self._left) > MOST_CLIENTS:
            self._left.popitem(last=False)
        return 0.0 if granted else (1.0 - left) / self.per_s


@dataclass(eq=False)
class AtOnce:
    """At most `most` at once of all clients, and `most_each` of each."""

    most: int
    most_each: int
    _open: Counter[str] = field(init=False, default_factory=Counter)

    @property
    def open(self) -> int:
        """Number open, over all clients."""
        return self._open.total()

    def admit(self, client: str) -> int:
        """Take one, and give it back later; return 0, or the limit that `client` has reached."""
        if self._open[client] >= self.most_each:
            return self.most_each
        if self.open >= self.most:
            return self.most
        self._open[client] += 1
        return 0

    def give_back(self, client: str) -> None:
        """One of those taken for `client` has ended."""
        self._open[client] -= 1
        if not self._open[client]:
            del self._open[client]


class FewOfAKind(logging.Filter):
    """Lets `burst` lines of each kind through at once, and `per_s` per second in the long run. The next one that passes
    says how many were left out. Lines of one kind come from one place in the code."""

    def __init__(self, per_s: float = 0.1, burst: int = 5) -> None:
        super().__init__()
        self._limit = RateLimit(per_s, burst)
        self._left_out: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        kind = f"{record.pathname}:{record.lineno}"
        if self._limit.wait_s(kind, record.created):
            self._left_out[kind] += 1
            return False
        if left_out := self._left_out.pop(kind, 0):
            record.msg = f"{record.getMessage()} ({left_out:,} more lines of this kind were left out)"
            record.args = ()
        return True
