"""Bounds how often a client may do something. Pure: the caller brings the clock."""

from __future__ import annotations

from collections import OrderedDict

MOST_CLIENTS = 10_000


class RateLimit:
    """At most `burst` at once, and `per_s` per second in the long run, for each client.

    Args:
        per_s: how many per second.
        burst: how many at once.
    """

    def __init__(self, per_s: float, burst: int) -> None:
        self._per_s = per_s
        self._burst = burst
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Client -> (how many are left, at that time); the longest idle first."""

    def wait_s(self, client: str, now_s: float) -> float:
        """Take one; return 0, or how long to wait because none is left."""
        left, then_s = self._left.pop(client, (float(self._burst), now_s))
        left = min(float(self._burst), left + (now_s - then_s) * self._per_s)
        granted = left >= 1.0
        self._left[client] = (left - 1.0 if granted else left, now_s)
        if len(self._left) > MOST_CLIENTS:
            self._left.popitem(last=False)
        return 0.0 if granted else (1.0 - left) / self._per_s
