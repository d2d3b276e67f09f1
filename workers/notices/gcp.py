"""Google Cloud: the notice 30 s before a spot instance stops, and maintenance that stops an instance.

Compute Engine, "Create and use Spot VMs" and "Query the metadata server for maintenance event notices".
Maintenance that migrates a running instance is no reason to leave it.
"""

from __future__ import annotations

from workers.notices.metadata import ask, refusal
from workers.notices.notice import Notice, NoticeError

BASE = "http://metadata.google.internal"
PREEMPTED = "/computeMetadata/v1/instance/preempted"
MAINTENANCE = "/computeMetadata/v1/instance/maintenance-event"
FLAVOR = "Metadata-Flavor"
PREEMPTION_S = 30.0
"""Seconds from the notice to the forced stop of a spot instance."""
MAINTENANCE_S = 60.0
"""Seconds from the notice to the stop for maintenance. GPU instances get an hour, but do not report it."""


class Gcp:
    """The metadata server of a Compute Engine instance.

    Args:
        base: its address.
    """

    name = "gcp"
    every_s = 1.0
    of_node = True

    def __init__(self, base: str = BASE) -> None:
        self._base = base

    def look(self) -> tuple[Notice, ...]:
        """A preemption, and maintenance that stops the instance.

        Raises:
            NoticeError: the server does not answer as documented.
        """
        notices: list[Notice] = []
        if self._value(PREEMPTED, {"TRUE", "FALSE"}) == "TRUE":
            notices.append(Notice(source=self.name, left_s=PREEMPTION_S, text="the instance is preempted"))
        events = {"NONE", "MIGRATE_ON_HOST_MAINTENANCE", "TERMINATE_ON_HOST_MAINTENANCE"}
        if self._value(MAINTENANCE, events) == "TERMINATE_ON_HOST_MAINTENANCE":
            text = "the host is maintained: TERMINATE_ON_HOST_MAINTENANCE"
            notices.append(Notice(source=self.name, left_s=MAINTENANCE_S, text=text))
        return tuple(notices)

    def _value(self, path: str, known: set[str]) -> str:
        answer = ask(self._base, path, {FLAVOR: "Google"})
        if answer.status != 200:
            raise refusal(self._base, path, answer)
        if answer.headers.get(FLAVOR) != "Google":
            raise NoticeError(f"what answers at {self._base} is not Google's metadata server")
        value = answer.body.strip().upper()
        if value not in known:
            raise NoticeError(f"{self._base}{path} answered {answer.body[:40]!r}")
        return value
