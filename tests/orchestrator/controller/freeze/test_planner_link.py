"""When a planner decides if a lost rank can no longer report the end of monitoring that it waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from lifecycle_jobs import plan_of, step_report
from planner_beside import PlannerBeside

from orchestrator.controller.freeze.planner_link import PlannerLink
from orchestrator.controller.planning.planner_process import PlannerGone, PlannerProcess
from orchestrator.controller.requests.freezing_in_force import GRACE_STEPS
from orchestrator.events.types import Warned
from orchestrator.history.freeze_history import FreezeHistory
from orchestrator.lifecycle.stimuli import Noted, Solved, Stimulus
from planner.freeze.decision import FreezeQuestion
from planner.freezing import Phases
from planner.schedule.expand import schedule_of
from workers.protocol.reports import ActionSpan, TimelineReport

PHASES = Phases(warm_up=0, monitoring=4, ramp=6)
PLAN = plan_of(2, layers=2)
SCHEDULE = schedule_of(PLAN)
QUESTION = FreezeQuestion(plan=PLAN, schedule=SCHEDULE, phases=PHASES, r_max=0.8)


def seen(step: int, rank: int) -> TimelineReport:
    """F takes 1 s; B takes 2 s, or 1 s with everything frozen."""
    backward_s = 2.0 if step <= PHASES.middle else 1.0
    spans, now_s = [], 0.0
    for action in SCHEDULE.programs[rank]:
        end_s = now_s + (1.0 if str(action.kind) == "F" else backward_s)
        spans.append(ActionSpan(action=str(action), start_s=now_s, end_s=end_s))
        now_s = end_s
    return TimelineReport(step=step, rank=rank, step_s=now_s, spans=tuple(spans), memory_bytes=0)


def test_it_decides_without_what_does_not_come() -> None:
    async def ask() -> None:
        planner = PlannerBeside(lambda: None, lambda stimulus: None, asyncio.ensure_future)
        solved: list[Stimulus] = []
        link = PlannerLink(planner, QUESTION, FreezeHistory(), 1, solved.append)
        running = asyncio.ensure_future(link.run(0))
        known = [seen(step, rank) for step in range(1, 5) for rank in range(2)]
        for report in known[:-1]:
            link.fold(report)
        link.fold(step_report(PHASES.monitoring + GRACE_STEPS - 1))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(running), 0.05)
        # A lost rank can no longer tell of the end, and those who live have told all.
        link.fold(step_report(PHASES.monitoring + GRACE_STEPS))
        await running
        (answer,) = solved
        assert isinstance(answer, Solved)
        assert answer.solution.measured_unfrozen_s == 6.0
        assert answer.solution.solved_s < answer.solution.unfrozen_s

    asyncio.run(ask())


class DyingPlanner(PlannerBeside):
    """A planner that dies as often as it is to."""

    def __init__(self, deaths: int) -> None:
        super().__init__(lambda: None, lambda stimulus: None, asyncio.ensure_future)
        self.deaths = deaths
        self._up.set()

    async def ask(self, method: Callable[..., Awaitable[Any]], *arguments: Any, **named: Any) -> Any:
        if self.deaths:
            self.deaths -= 1
            raise PlannerGone("killed")
        return await super().ask(method, *arguments, **named)

    answer = PlannerProcess.answer


@pytest.mark.parametrize("deaths", [0, 1, 5])
def test_the_next_planner_is_asked_the_same(deaths: int) -> None:
    async def ask() -> None:
        planner, solved = DyingPlanner(deaths), list[Stimulus]()
        link = PlannerLink(planner, QUESTION, FreezeHistory(), 1, solved.append)
        for report in [seen(step, rank) for step in range(1, 5) for rank in range(2)]:
            link.fold(report)
        await link.run(0)
        assert planner.deaths == 0
        assert [type(each) for each in solved] == [Solved]

    asyncio.run(ask())


def test_a_question_without_an_answer_is_told() -> None:
    async def ask() -> None:
        planner = PlannerBeside(lambda: None, lambda stimulus: None, asyncio.ensure_future)
        told: list[Stimulus] = []
        await PlannerLink(planner, QUESTION, FreezeHistory(), 1, told.append).run(PHASES.monitoring)
        (said,) = told
        assert isinstance(said, Noted)
        assert isinstance(said.event, Warned)
        assert said.event.text.endswith("; the job trains on with nothing frozen")

    asyncio.run(ask())
