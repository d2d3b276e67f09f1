"""Keeps ranks off nodes on which ranks did not start, for a while. Pure: the time is an argument."""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST_S = 2.0
MOST_S = 120.0


@dataclass
class Backoff:
    """Each failure in a row doubles a node's pause, up to `MOST_S`."""

    _failures: dict[str, int] = field(default_factory=dict)
    _until_s: dict[str, float] = field(default_factory=dict)

    def failed(self, node: str, now_s: float) -> float:
        """Record that a rank did not start on `node`; return how long the node gets no other."""
        self._failures[node] = self._failures.get(node, 0) + 1
        pause_s = min(MOST_S, FIRST_S * 2 ** (self._failures[node] - 1))
        self._until_s[node] = now_s + pause_s
        return pause_s

    def started(self, node: str) -> None:
        """Record that a rank is up on `node`."""
        self._failures.pop(node, None)
        self._until_s.pop(node, None)

    def avoids(self, node: str, now_s: float) -> bool:
        """Whether `node` gets no rank now."""
        return now_s < self._until_s.get(node, now_s)
