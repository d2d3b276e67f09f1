"""The planner's Ray shells: they take observations and return decisions. The only planner module that imports Ray.

An actor may die at any time: the controller then starts another one, with what is known.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import ray

from planner.adapt.live import Heard, LiveStart, Question
from planner.adapt.policy import Decision
from planner.adapt.recording import planner_of
from planner.freeze.decision import FreezeDecision, FreezeQuestion, decide
from planner.freeze.monitoring import Observation, complete
from planner.observed import StepTimes
from planner.plan import Plan
from planner.search.replan import Replanner


@dataclass(frozen=True, kw_only=True)
class PlannerHome:
    """The process of a planner."""

    node: str
    pid: int


class _Shell:
    """Interface of every planner process."""

    async def home(self) -> PlannerHome:
        """This planner's process, once it runs."""
        return PlannerHome(node=ray.get_runtime_context().get_node_id(), pid=os.getpid())

    async def stay(self) -> None:
        """Never return: the call fails when this process dies, and so the controller notices."""
        await asyncio.Event().wait()


class LivePlannerActor(_Shell):
    """The planner of a job that adapts. A decision runs in a thread, so that observations need not wait for it."""

    def __init__(self, start: LiveStart) -> None:
        self._planner = planner_of(start)

    async def take(self, batch: Sequence[StepTimes], plans: Sequence[Plan], members: Sequence[int]) -> Heard:
        """See `LivePlanner.take`."""
        return self._planner.take(batch, plans, members)

    async def keep(self, ranks: Sequence[int]) -> None:
        """See `LivePlanner.keep`."""
        self._planner.keep(ranks)

    async def plan_with(self, replanner: Replanner) -> None:
        """See `LivePlanner.plan_with`."""
        self._planner.plan_with(replanner)

    async def decide(self, question: Question) -> Decision:
        """See `LivePlanner.decide`."""
        return await asyncio.to_thread(self._planner.considering(question))


class PlannerActor(_Shell):
    """The planner of a job's freezing. Calls are idempotent, and a waiting call does not block the others."""

    def __init__(self, question: FreezeQuestion) -> None:
        self._question = question
        self._observations: dict[tuple[int, int], Observation] = {}
        self._complete = asyncio.Event()

    async def observe(self, observations: Iterable[Observation]) -> None:
        """Add observations of monitored steps. The newest one of a step and rank replaces the earlier ones."""
        question = self._question
        self._observations |= {(seen.step, seen.rank): seen for seen in observations}
        if complete(self._observations.values(), question.phases, question.plan.world_size):
            self._complete.set()

    async def enough(self) -> None:
        """Decide with the observations so far: no more will come."""
        self._complete.set()

    async def solve(self, *, wait: bool = True) -> tuple[FreezeDecision, float]:
        """Decide; return the decision and the seconds that it took.

        Args:
            wait: whether to wait until monitoring has ended; else the observations so far must suffice.

        Raises:
            ValueError: the observations do not allow a decision.
        """
        if wait:
            await self._complete.wait()
        begun_s = time.perf_counter()
        observations = list(self._observations.values())
        decision = await asyncio.to_thread(decide, self._question, observations)
        return decision, time.perf_counter() - begun_s
