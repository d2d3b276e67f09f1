"""`freshet fault`: injects faults into a running job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.commands.command import JobCommand


class InjectFault(JobCommand):
    """Inject a fault into a running job that allows faults."""

    name = "fault"
    route = "faults"
    derived = False
    at_once = True

    drill: Mapping[str, Any]
    """A `workers.fault_injection.drill.Drill`, as JSON values."""

    def body(self) -> Mapping[str, Any] | None:
        return self.drill
