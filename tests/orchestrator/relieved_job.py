"""A job on plain processes whose controller keeps its plans within the memory that its ranks turn out to have."""

from __future__ import annotations

import time
from typing import Any

from process_hosts import ElasticJob

from orchestrator.controller.adapt.memory_relief import MemoryRelief
from orchestrator.controller.reshaping import Reshaping
from orchestrator.events import types as events
from orchestrator.history.job_view import JobView


class RelievedJob(ElasticJob):
    """A job under the real lifecycle, with the real relief; the arguments are those of `ElasticJob`."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self.view = JobView()
        self._relief: MemoryRelief | None = None
        super().__init__(*given, **named)
        reshaping = Reshaping(self.order, self.setup, self.loop, self.runtime, self.hosts)
        self._relief = MemoryRelief(
            self.setup, self.loop, lambda: self.view, self.runtime.planning, reshaping.migrate
        )

    def _take(self, event: events.Event) -> None:
        self.view.fold(events.Record(time_s=time.time(), event=event))
        if self._relief is not None:
            self._relief.fold(event)
        super()._take(event)
