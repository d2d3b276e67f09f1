"""Holds back a rank's reports on its steps until every rank has passed their commits.

A commit that only some ranks have seen may still be undone when others fail. Knows no training and no network.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from workers.protocol.reports import Report

KEPT = 10_000
"""Number of the newest shared reports that each rank keeps, to send them again after a failure."""


@dataclass(frozen=True)
class _Told:
    step: int
    report: Report
    shared: bool
    """Every rank has it; the first one sends it."""


class Announcements:
    """The reports of one rank in one generation.

    Args:
        first: whether it is the first rank.
    """

    def __init__(self, report: Callable[[Report], None], *, first: bool) -> None:
        self._report = report
        self._first = first
        self._waiting: list[_Told] = []
        self._recent: deque[_Told] = deque(maxlen=KEPT)

    def add(self, step: int, report: Report) -> None:
        """Send `report`, of this rank alone, once all have passed the commit of `step`."""
        self._waiting.append(_Told(step, report, shared=False))

    def add_shared(self, step: int, report: Report) -> None:
        """Have the first rank send `report` once all have passed the commit of `step`. All ranks add it."""
        self._waiting.append(_Told(step, report, shared=True))

    def release(self, step: int) -> None:
        """Send the reports of all steps up to `step`, whose commits every rank has passed."""
        told = [waiting for waiting in self._waiting if waiting.step <= step]
        self._waiting = [waiting for waiting in self._waiting if waiting.step > step]
        for one in told:
            if one.shared and not self._first:
                self._recent.append(one)
            if self._first or not one.shared:
                self._report(one.report)

    def end(self, step: int, reported: int) -> None:
        """Send what is left after a failure that ended the generation at `step`.

        The first rank may be gone, and its last reports with it: every rank sends the shared reports from step
        `reported` on. Reports of steps after `step` are dropped.
        """
        waiting, self._waiting = self._waiting, []
        recent, self._recent = list(self._recent), deque(maxlen=KEPT)
        for one in recent:
            if reported <= one.step <= step:
                self._report(one.report)
        for one in waiting:
            if one.step <= step:
                self._report(one.report)
