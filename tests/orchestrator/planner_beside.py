"""A job's planner in the controller's own process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from orchestrator.controller.planning.planner_process import PlannerProcess
from planner.actor import PlannerActor


class PlannerBeside(PlannerProcess):
    """A planner that nobody needs to keep: it begins when it is asked first."""

    _beside: PlannerActor | None = None

    def keep(self, task: str, otherwise: Callable[[], str]) -> None:
        pass

    async def ask(self, method: Callable[..., Awaitable[Any]], *arguments: Any, **named: Any) -> Any:
        if self._beside is None:
            self._beside = PlannerActor(self._start())
        return await method(self._beside, *arguments, **named)

    answer = ask
