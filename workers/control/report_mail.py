"""Keeps reports to the controller until they arrive: the controller may die and be replaced.

Knows no Ray: the caller passes the functions that send a report and check its arrival.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from workers.protocol.reports import Report, StepReport

KEPT = 10_000
"""Reports kept while the controller is away; beyond that, the oldest that are no `StepReport` are dropped."""
LOOK_EVERY = 32
"""Reports sent between two checks of which have arrived."""
UNANSWERED = object()
"""In place of the answer to a report that has not arrived."""


@dataclass(frozen=True)
class _Sent:
    """A report on its way."""

    report: Report
    handle: Any
    made_s: float


class ReportMail:
    """Sends reports in order, from any thread.

    Args:
        send: starts sending a report and returns a handle.
        answers: returns for each handle the controller's answer to its report, which is the hash of a line of the event
            log or None; `UNANSWERED` while the report is under way. Does not wait; a failed send is never answered.
    """

    def __init__(
        self, send: Callable[[Report], Any], answers: Callable[[Sequence[Any]], Sequence[Any]]
    ) -> None:
        self._send = send
        self._answers = answers
        self._lock = threading.Lock()
        self._kept: list[_Sent] = []
        self._since_look = 0
        self._log_sha256: str | None = None

    def put(self, report: Report) -> Any:
        """Send `report`; returns its handle."""
        with self._lock:
            handle = self._send(report)
            self._kept.append(_Sent(report, handle, time.time()))
            self._since_look += 1
            if self._since_look >= LOOK_EVERY:
                self._look()
            return handle

    def send_again(self, send: Callable[[Report], Any]) -> None:
        """Send with `send` from now on, and first resend what has not arrived."""
        with self._lock:
            self._look()
            self._send = send
            self._kept = [replace(sent, handle=send(sent.report)) for sent in self._kept]

    def under_way(self) -> list[Any]:
        """Return the handles of reports not known to have arrived."""
        with self._lock:
            self._look()
            return [sent.handle for sent in self._kept]

    def unreported(self) -> list[tuple[float, Report]]:
        """Return the reports not known to have arrived, each with the time at which it was made, in seconds since the
        Unix epoch."""
        with self._lock:
            self._look()
            return [(sent.made_s, sent.report) for sent in self._kept]

    def log_sha256(self) -> str | None:
        """Return the hash of a line of the event log, of the newest one that the controller has told of; None if it has
        told of none. Does not wait."""
        with self._lock:
            self._look()
            return self._log_sha256

    def _look(self) -> None:
        self._since_look = 0
        answers = self._answers([sent.handle for sent in self._kept])
        for answer in answers:
            if answer is not UNANSWERED and answer is not None:
                self._log_sha256 = answer
        pairs = zip(self._kept, answers, strict=True)
        self._kept = [sent for sent, answer in pairs if answer is UNANSWERED]
        excess = len(self._kept) - KEPT
        if excess > 0:
            minor = [i for i, sent in enumerate(self._kept) if not isinstance(sent.report, StepReport)]
            dropped = set(minor[:excess])
            self._kept = [sent for i, sent in enumerate(self._kept) if i not in dropped]
