"""Reports on their way to the controller, kept until it has taken them in: it may die, and another one come.

Knows no Ray: what carries a report, and what tells that it has arrived, is given.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from workers.protocol import Report, StepReport

KEPT = 10_000
"""Reports kept for a controller that is away; past that the oldest go that are no `StepReport`."""
LOOK_EVERY = 32
"""Reports between two looks at which have arrived."""


class ReportMail:
    """Sends reports in order, from any thread.

    Args:
        send: starts a report on its way and returns a handle of that.
        arrived: of these handles, which have arrived; does not wait. What failed to arrive never does.
    """

    def __init__(
        self, send: Callable[[Report], Any], arrived: Callable[[Sequence[Any]], Sequence[bool]]
    ) -> None:
        self._send = send
        self._arrived = arrived
        self._lock = threading.Lock()
        self._kept: list[tuple[Report, Any]] = []
        self._since_look = 0

    def put(self, report: Report) -> Any:
        """Send `report`; returns its handle."""
        with self._lock:
            handle = self._send(report)
            self._kept.append((report, handle))
            self._since_look += 1
            if self._since_look >= LOOK_EVERY:
                self._look()
            return handle

    def send_again(self, send: Callable[[Report], Any]) -> None:
        """From now on send with `send`; first of all what has not arrived."""
        with self._lock:
            self._look()
            self._send = send
            self._kept = [(report, send(report)) for report, _ in self._kept]

    def under_way(self) -> list[Any]:
        """Handles of what is not known to have arrived."""
        with self._lock:
            self._look()
            return [handle for _, handle in self._kept]

    def _look(self) -> None:
        self._since_look = 0
        there = self._arrived([handle for _, handle in self._kept])
        self._kept = [kept for kept, arrived in zip(self._kept, there, strict=True) if not arrived]
        excess = len(self._kept) - KEPT
        if excess > 0:
            minor = [i for i, (report, _) in enumerate(self._kept) if not isinstance(report, StepReport)]
            dropped = set(minor[:excess])
            self._kept = [kept for i, kept in enumerate(self._kept) if i not in dropped]
