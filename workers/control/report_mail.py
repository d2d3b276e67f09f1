"""Keeps reports to the controller until they arrive: the controller may die and be replaced.

Knows no Ray: the caller passes the functions that send a report and check its arrival.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from workers.protocol import Report, StepReport

KEPT = 10_000
"""Reports kept while the controller is away; beyond that, the oldest that are no `StepReport` are dropped."""
LOOK_EVERY = 32
"""Reports sent between two checks of which have arrived."""


class ReportMail:
    """Sends reports in order, from any thread.

    Args:
        send: starts sending a report and returns a handle.
        arrived: says for each handle whether its report has arrived; does not wait. A failed send never arrives.
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
        """Send with `send` from now on, and first resend what has not arrived."""
        with self._lock:
            self._look()
            self._send = send
            self._kept = [(report, send(report)) for report, _ in self._kept]

    def under_way(self) -> list[Any]:
        """Return the handles of reports not known to have arrived."""
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
