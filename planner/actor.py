"""The planner's Ray actor: it takes observations and returns decisions. The only planner module that imports Ray.

It may die at any time: the controller then starts another one, with what is known.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import ray

from planner.adapt.live import Heard, LivePlanner, LiveStart, Question
from planner.adapt.policy import MoveDecision
from planner.adapt.recording import planner_of
from planner.freeze.decision import FreezeDecision, FreezeQuestion, decide
from planner.freeze.monitoring import Observation
from planner.observed import StepTimes
from planner.plan import Plan
from planner.search.replan import Replanner


@dataclass(frozen=True, kw_only=True)
class PlannerHome:
    """The process of a planner."""

    node: str
    pid: int


class PlannerActor:
    """The planner of one job. Decisions run in threads, so that observations need not wait for them.

    Args:
        start: of its knowledge of the ranks' speeds; None: the job does not adapt, and nobody asks.
    """

    def __init__(self, start: LiveStart | None) -> None:
        self._planner = None if start is None else planner_of(start)

    @property
    def _live(self) -> LivePlanner:
        assert self._planner is not None, "a job that does not adapt has no speeds to plan for"
        return self._planner

    async def home(self) -> PlannerHome:
        """This planner's process, once it runs."""
        return PlannerHome(node=ray.get_runtime_context().get_node_id(), pid=os.getpid())

    async def stay(self) -> None:
        """Never return: the call fails when this process dies, and so the controller notices."""
        await asyncio.Event().wait()

    async def observe(
        self, batch: Sequence[StepTimes], plans: Sequence[Plan], members: Sequence[int]
    ) -> Heard:
        """See `LivePlanner.observe`."""
        return self._live.observe(batch, plans, members)

    async def keep(self, ranks: Sequence[int]) -> None:
        """See `LivePlanner.keep`."""
        self._live.keep(ranks)

    async def plan_with(self, replanner: Replanner) -> None:
        """See `LivePlanner.plan_with`."""
        self._live.plan_with(replanner)

    async def decide(self, question: Question) -> MoveDecision:
        """See `LivePlanner.decide`."""
        return await asyncio.to_thread(self._live.considering(question))

    async def solve(
        self, question: FreezeQuestion, observations: Sequence[Observation]
    ) -> tuple[FreezeDecision, float]:
        """Decide what to freeze; return the decision and the seconds that it took.

        Raises:
            ValueError: the observations do not allow a decision.
        """
        begun_s = time.perf_counter()
        decision = await asyncio.to_thread(decide, question, observations)
        return decision, time.perf_counter() - begun_s
