"""Azure: scheduled events that remove a virtual machine, or clear its memory.

"Scheduled Events for Linux VMs". Every machine of an availability set receives them, so each looks for its
own name. A `Freeze` is a pause of seconds and no reason to leave. Events are not acknowledged: that would
bring them forward for all the machines that they name.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import Any

from workers.notices.metadata import TIMEOUT_S, MetadataAnswer, ask, refusal
from workers.notices.notice import Notice, NoticeError

BASE = "http://169.254.169.254"
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
LEAVING = {"Preempt", "Terminate", "Reboot", "Redeploy"}
FIRST_ANSWER_S = 130.0
"""Timeout of the first request, which enables the service; that may take two minutes."""


class Azure:
    """The metadata service of an Azure virtual machine.

    Args:
        base: its address.
        now: seconds since the Unix epoch.
    """

    name = "azure"
    every_s = 1.0
    of_node = True

    def __init__(self, base: str = BASE, now: Callable[[], float] = time.time) -> None:
        self._base = base
        self._now = now
        self._machine: str | None = None
        self._timeout_s = FIRST_ANSWER_S

    def look(self) -> tuple[Notice, ...]:
        """The events that name this machine.

        Raises:
            NoticeError: the service does not answer as documented.
        """
        if self._machine is None:
            self._machine = self._get(NAME, TIMEOUT_S).body.strip().lower()
        document = self._get(EVENTS, self._timeout_s).json()
        self._timeout_s = TIMEOUT_S
        events = document.get("Events")
        if not isinstance(events, list):
            raise NoticeError(f"it answered without a list of events: {str(document)[:80]}")
        notices = [self._notice(event, self._machine) for event in events]
        return tuple(notice for notice in notices if notice is not None)

    def _notice(self, event: Any, machine: str) -> Notice | None:
        match event:
            case {
                "EventId": str(identity),
                "EventType": str(kind),
                "EventStatus": str(status),
                "NotBefore": str(not_before),
                "Resources": [*names],
            }:
                pass
            case _:
                raise NoticeError(f"an event of its answer is not understood: {str(event)[:80]}")
        if kind not in LEAVING or machine not in (str(name).lower() for name in names):
            return None
        return Notice(
            source=self.name, left_s=self._left_s(status, not_before), text=f"{kind} (event {identity})"
        )

    def _left_s(self, status: str, not_before: str) -> float | None:
        if status == "Started":
            return 0.0
        return max(0.0, _seconds(not_before) - self._now()) if not_before else None

    def _get(self, path: str, timeout_s: float) -> MetadataAnswer:
        answer = ask(self._base, path, {"Metadata": "true"}, timeout_s=timeout_s)
        if answer.status != 200:
            raise refusal(self._base, path, answer)
        return answer


def _seconds(at: str) -> float:
    """Seconds since the Unix epoch of a time such as `Mon, 19 Sep 2016 18:29:47 GMT`."""
    try:
        return parsedate_to_datetime(at).timestamp()
    except ValueError:
        raise NoticeError(f"its answer has {at[:40]!r} where a time is expected") from None
