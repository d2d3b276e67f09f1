"""When a planner decides if a lost rank can no longer report the end of monitoring that it waits for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from lifecycle_jobs import plan_of, step_report

from orchestrator.controller.freeze.planner_link import PlannerLink
from orchestrator.controller.requests.freeze_request import GRACE_STEPS
from orchestrator.history.freeze_history import FreezeHistory
from planner.actor import PlannerActor
from planner.freeze.decision import FreezeQuestion
from planner.freeze.monitoring import Observation
from planner.freezing import Phases
from planner.schedule.expand import schedule_of

PHASES = Phases(warm_up=0, monitoring=4, ramp=6)
PLAN = plan_of(2, layers=2)
SCHEDULE = schedule_of(PLAN)
QUESTION = FreezeQuestion(plan=PLAN, schedule=SCHEDULE, phases=PHASES, r_max=0.8)


def seen(step: int, rank: int) -> Observation:
    """F takes 1 s; B takes 2 s, or 1 s with everything frozen."""
    backward_s = 2.0 if step <= PHASES.middle else 1.0
    spans, now_s = [], 0.0
    for action in SCHEDULE.programs[rank]:
        end_s = now_s + (1.0 if str(action.kind) == "F" else backward_s)
        spans.append((str(action), now_s, end_s))
        now_s = end_s
    return Observation(step=step, rank=rank, step_s=now_s, spans=tuple(spans))


def test_it_decides_without_what_does_not_come() -> None:
    async def ask() -> None:
        planner = PlannerActor(QUESTION)
        solving = asyncio.ensure_future(planner.solve())
        known = [seen(step, rank) for step in range(1, 5) for rank in range(2)]
        await planner.observe(known[:-1])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(solving), 0.05)
        await planner.enough()
        decision, _ = await solving
        assert decision.bounds.upper_step_s == 6.0
        assert decision.solution.solved_s < decision.solution.unfrozen_s

    asyncio.run(ask())


def test_it_is_told_once_those_who_live_have_told_all() -> None:
    told: list[str] = []
    link = PlannerLink(QUESTION, FreezeHistory(), 1, lambda stimulus: None)
    link._actor = SimpleNamespace(enough=SimpleNamespace(remote=lambda: told.append("enough")))
    link.take(step_report(PHASES.monitoring + GRACE_STEPS - 1))
    assert told == []
    for step in (0, 1):
        link.take(step_report(PHASES.monitoring + GRACE_STEPS + step))
    assert told == ["enough"]
