"""The planner's Ray shell: it takes observations in and hands decisions out. The only planner module that knows Ray.

It may die at any time: whoever started it starts another one and tells it the same again.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

import ray

from planner.freeze.decision import FreezeDecision, FreezeQuestion, decide
from planner.freeze.monitoring import Observation, complete


@dataclass(frozen=True, kw_only=True)
class PlannerHome:
    """Where a planner lives."""

    node: str
    pid: int


class PlannerActor:
    """The planner of one job. Calls are idempotent, and a waiting one keeps no other from being served."""

    def __init__(self, question: FreezeQuestion) -> None:
        self._question = question
        self._observations: dict[tuple[int, int], Observation] = {}
        self._complete = asyncio.Event()

    async def home(self) -> PlannerHome:
        """Where this planner lives, once it does."""
        return PlannerHome(node=ray.get_runtime_context().get_node_id(), pid=os.getpid())

    async def observe(self, observations: Iterable[Observation]) -> None:
        """Take what ranks did in monitored steps; of the same step and rank the newest counts."""
        question = self._question
        self._observations |= {(seen.step, seen.rank): seen for seen in observations}
        if complete(self._observations.values(), question.phases, question.plan.world_size):
            self._complete.set()

    async def enough(self) -> None:
        """Nothing more will be observed: what is known must do."""
        self._complete.set()

    async def solve(self, *, wait: bool = True) -> tuple[FreezeDecision, float]:
        """Decide. Returns the decision and the seconds that it took.

        Args:
            wait: until the end of monitoring was observed; otherwise what is known must do.

        Raises:
            ValueError: what was observed does not allow a decision.
        """
        if wait:
            await self._complete.wait()
        begun_s = time.perf_counter()
        observations = list(self._observations.values())
        decision = await asyncio.to_thread(decide, self._question, observations)
        return decision, time.perf_counter() - begun_s

    async def stay(self) -> None:
        """Never returns: the call fails when this process dies, which is how its death is noticed."""
        await asyncio.Event().wait()
