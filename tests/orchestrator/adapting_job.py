"""A job on plain processes whose controller adapts its plans to the ranks' speeds."""

from __future__ import annotations

import time
from collections.abc import Callable

from planner_beside import PlannerBeside
from process_hosts import ElasticJob

from orchestrator.controller.adapt.adaptation import Adaptation, live_start
from orchestrator.controller.reshaping import Reshaping
from orchestrator.events import types as events
from orchestrator.history.job_view import JobView
from orchestrator.prepare.settling import Settled
from planner.observed import StepTimes
from planner.profile import Profile


class AdaptingJob(ElasticJob):
    """A job under the real lifecycle, with the real adaptation.

    Args:
        act: called with this job and each event when the event is logged.
        profile: of its layers.
    """

    def __init__(
        self, resolved: Settled, act: Callable[[ElasticJob, events.Event], None], profile: Profile
    ) -> None:
        self.view = JobView()
        self._adaptation: Adaptation | None = None
        super().__init__(resolved, act, profile=profile)
        reshaping = Reshaping(self.order, self.setup, self.loop, self.runtime, self.hosts)
        self._adaptation = Adaptation(
            self.setup,
            self.loop,
            lambda: self.view,
            self.runtime.planning,
            reshaping.migrate,
            PlannerBeside(lambda: live_start(self.setup, self.view), self.loop.post, self.loop.spawn),
        )

    def observe(self, observed: StepTimes) -> None:
        if self._adaptation is not None:
            self._adaptation.observe([observed])

    def _take(self, event: events.Event) -> None:
        self.view.fold(events.Record(time_s=time.time(), event=event))
        super()._take(event)
        if self._adaptation is not None:
            self._adaptation.fold(event)
