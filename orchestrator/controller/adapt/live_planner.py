"""Where the planner of a job that adapts lives: in a process of its own, or, without Ray, beside the controller.

A planner that dies costs what it has not told: the next one begins with what the log knows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError, RayError

from orchestrator.controller.planning.planner_process import LIVES, reason_of, start_planner
from orchestrator.events.types import PlannerStarted, Warned
from orchestrator.lifecycle.stimuli import Noted, Stimulus
from planner.actor import LivePlannerActor, PlannerHome
from planner.adapt.live import Heard, LivePlanner, LiveStart, Question
from planner.adapt.policy import Decision
from planner.adapt.recording import planner_of
from planner.observed import StepTimes
from planner.plan import Plan
from planner.search.replan import Replanner


class PlannerGone(Exception):
    """No planner answers at the moment: ask the next one."""


class LivePlannerHome(Protocol):
    """A planner, wherever it lives. Each call may raise `PlannerGone`."""

    lives: int
    """Number of planners so far; each begins without a replanner."""

    async def run(self) -> None:
        """Keep a planner until cancelled."""
        ...

    async def take(self, batch: Sequence[StepTimes], plans: Sequence[Plan], members: Sequence[int]) -> Heard:
        """See `LivePlanner.take`."""
        ...

    async def keep(self, ranks: Sequence[int]) -> None:
        """See `LivePlanner.keep`."""
        ...

    async def plan_with(self, replanner: Replanner) -> None:
        """See `LivePlanner.plan_with`."""
        ...

    async def decide(self, question: Question) -> Decision:
        """See `LivePlanner.decide`."""
        ...


class PlannerBeside:
    """A planner in this process."""

    def __init__(self, start: Callable[[], LiveStart]) -> None:
        self._start = start
        self._planner: LivePlanner | None = None
        self.lives = 1

    @property
    def planner(self) -> LivePlanner:
        if self._planner is None:
            self._planner = planner_of(self._start())
        return self._planner

    async def run(self) -> None:
        """It needs nobody to keep it."""

    async def take(self, batch: Sequence[StepTimes], plans: Sequence[Plan], members: Sequence[int]) -> Heard:
        return self.planner.take(batch, plans, members)

    async def keep(self, ranks: Sequence[int]) -> None:
        self.planner.keep(ranks)

    async def plan_with(self, replanner: Replanner) -> None:
        self.planner.plan_with(replanner)

    async def decide(self, question: Question) -> Decision:
        return await asyncio.to_thread(self.planner.considering(question))


class PlannerInRay:
    """A planner in a Ray actor, replaced when it dies.

    Args:
        start: returns what a planner begins with at that moment.
        post: takes what people should know.
    """

    def __init__(self, start: Callable[[], LiveStart], post: Callable[[Stimulus], None]) -> None:
        self._start = start
        self._post = post
        self._actor: Any = None
        self.lives = 0

    async def run(self) -> None:
        """Keep a planner running until cancelled."""
        try:
            for life in range(1, LIVES + 1):
                try:
                    await self._live(life)
                except RayError as error:
                    after = (
                        "another one takes its place" if life < LIVES else "the job trains on with its cut"
                    )
                    text = f"the planner of the ranks' speeds died: {reason_of(error)}; {after}"
                    self._post(Noted(Warned(text=text)))
        finally:
            self._drop()

    async def _live(self, life: int) -> None:
        self._drop()
        actor = start_planner(LivePlannerActor, self._start())
        home: PlannerHome = await actor.home.remote()
        self._post(Noted(PlannerStarted(life=life, node=home.node, pid=home.pid, of="speeds")))
        self._actor, self.lives = actor, life
        await actor.stay.remote()

    async def take(self, batch: Sequence[StepTimes], plans: Sequence[Plan], members: Sequence[int]) -> Heard:
        return await self._ask("take", batch, plans, members)

    async def keep(self, ranks: Sequence[int]) -> None:
        await self._ask("keep", ranks)

    async def plan_with(self, replanner: Replanner) -> None:
        await self._ask("plan_with", replanner)

    async def decide(self, question: Question) -> Decision:
        return await self._ask("decide", question)

    async def _ask(self, method: str, *arguments: Any) -> Any:
        actor = self._actor
        if actor is None:
            raise PlannerGone("it has not started yet")
        try:
            return await getattr(actor, method).remote(*arguments)
        except RayActorError as error:
            raise PlannerGone(reason_of(error)) from error

    def _drop(self) -> None:
        if self._actor is not None:
            ray.kill(self._actor)
        self._actor = None
