"""The one planner of a job: what a question gets when planners die, and what a later task gets then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from ray.exceptions import RayActorError

from orchestrator.controller.planning.planner_process import LIVES, PlannerGone, PlannerProcess
from orchestrator.events.types import PlannerStarted, Warned
from orchestrator.lifecycle.stimuli import Noted, Stimulus
from planner.actor import PlannerActor


class Mortal(PlannerProcess):
    """A planner whose process dies of each question as often as it is to."""

    def __init__(self, deaths: int, post: Callable[[Stimulus], None]) -> None:
        super().__init__(lambda: None, post, asyncio.ensure_future)
        self.deaths = deaths
        self.dead = asyncio.Event()

    async def _live(self) -> None:
        self._actor, self.lives = self, self.lives + 1
        self._post(Noted(PlannerStarted(life=self.lives, node="n", pid=1)))
        self._up.set()
        self.dead.clear()
        await self.dead.wait()
        self._actor = None
        self._up.clear()
        raise RayActorError

    def _end(self) -> None:
        self._actor = None
        self._up.clear()

    async def ask(self, method: object, *arguments: object, **named: object) -> str:  # type: ignore[override]
        if self._actor is None:
            raise PlannerGone("it has not started yet")
        if self.deaths:
            self.deaths -= 1
            self._up.clear()
            self.dead.set()
            raise PlannerGone("killed")
        return "solved"


def lives_of(told: list[Stimulus]) -> list[int]:
    noted = [each.event for each in told if isinstance(each, Noted)]
    return [event.life for event in noted if isinstance(event, PlannerStarted)]


@pytest.mark.parametrize("deaths", [0, 1, LIVES - 1])
def test_a_question_is_put_to_the_next_planner(deaths: int) -> None:
    async def run() -> None:
        told: list[Stimulus] = []
        planner = Mortal(deaths, told.append)
        planner.keep("freezing", lambda: "trains on")
        assert await planner.answer(PlannerActor.solve) == "solved"
        assert lives_of(told) == [*range(1, deaths + 2)]

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_question_that_kills_each_planner_ends_and_a_later_task_gets_a_planner_again() -> None:
    async def run() -> None:
        told: list[Stimulus] = []
        planner = Mortal(LIVES, told.append)
        planner.keep("freezing", lambda: "trains on")
        with pytest.raises(PlannerGone):
            await planner.answer(PlannerActor.solve)
        while not planner._up.is_set():
            await asyncio.sleep(0)
        with pytest.raises(PlannerGone, match="no other is started"):
            await planner.answer(PlannerActor.solve)
        warned = [each.event for each in told if isinstance(each, Noted) and isinstance(each.event, Warned)]
        assert warned[-1].text.endswith("no other is started, and the job trains on")
        planner.keep("freezing", lambda: "trains on")
        assert await planner.answer(PlannerActor.solve) == "solved"
        assert lives_of(told) == [*range(1, LIVES + 2)], "no number twice"

    asyncio.run(asyncio.wait_for(run(), 30))
