"""The planner of a freezing job without Ray: it reads reports, solves after monitoring, and issues plans."""

from __future__ import annotations

from time import perf_counter

from orchestrator.history.freeze_history import observation
from planner.freeze.decision import FreezeDecision, FreezeQuestion, decide
from planner.freeze.monitoring import Observation, complete
from planner.freezing import FreezePlan, Phase
from workers.launch.ranks import LaunchedJob
from workers.protocol.reports import Report, TimelineReport


class PlannerInProcess:
    """An observer for `run_processes`: it answers the last report of monitoring with a freeze plan."""

    def __init__(self, job: LaunchedJob) -> None:
        freeze = job.config.freeze
        assert freeze.phases is not None, f"freeze.method = {freeze.method!r} asks no planner"
        self._question = FreezeQuestion(
            plan=job.plan, schedule=job.schedule, phases=freeze.phases, r_max=freeze.r_max
        )
        self._observations: list[Observation] = []
        self.decision: FreezeDecision | None = None
        self.solve_s = 0.0

    def __call__(self, report: Report) -> FreezePlan | None:
        """Take a report; return the plan once monitoring has ended."""
        question = self._question
        if not isinstance(report, TimelineReport) or question.phases.of(report.step) not in (
            Phase.UPPER,
            Phase.LOWER,
        ):
            return None
        self._observations.append(observation(report))
        if not complete(self._observations, question.phases, question.plan.world_size):
            return None
        begun_s = perf_counter()
        self.decision = decide(question, self._observations)
        self.solve_s = perf_counter() - begun_s
        return self.decision.freeze_plan(question.plan, epoch=1)
