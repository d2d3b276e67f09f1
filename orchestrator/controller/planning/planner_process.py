"""The process of a job's planner: on the controller's node, so that both start and end together, and replaced when it
dies.

A planner's failure never ends the job or makes a rank wait. One that dies costs what it has not told: the next one
begins with what the log knows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.controller.event_loop import Work
from orchestrator.events.types import PlannerStarted, Warned
from orchestrator.lifecycle.stimuli import Noted, Stimulus
from planner.actor import PlannerActor, PlannerHome
from planner.adapt.live import LiveStart

LIVES = 6
"""Most planners that a controller starts, one after the other's death, before it gives up."""
Asked = ParamSpec("Asked")
Answer = TypeVar("Answer")


class PlannerGone(Exception):
    """No planner answers at the moment: ask the next one."""


class PlannerProcess:
    """The planner of one job in a Ray actor, whatever it plans. All methods run on the controller's event loop.

    Args:
        start: returns what a planner begins with at that moment; None: it plans for no speeds.
        post: takes what people should know.
        spawn: runs work in the background until the job ends.
    """

    def __init__(
        self,
        start: Callable[[], LiveStart | None],
        post: Callable[[Stimulus], None],
        spawn: Callable[[Work], asyncio.Task[None]],
    ) -> None:
        self._start = start
        self._post = post
        self._spawn = spawn
        self._tasks: dict[str, Callable[[], str]] = {}
        """Task -> what the job does without a planner for it, in words."""
        self._running: asyncio.Task[None] | None = None
        self._given_up = False
        self._actor: Any = None
        self._up = asyncio.Event()
        """Whether a planner can be asked, or none will be."""
        self.lives = 0
        """Number of planners so far; each begins without a replanner. Only grows."""

    def keep(self, task: str, otherwise: Callable[[], str]) -> None:
        """Keep a planner for `task` from now on, until it is dropped or the job ends; start anew where none was started
        any more.

        Args:
            otherwise: says what the job does without one.
        """
        self._tasks[task] = otherwise
        if self._running is None or self._running.done():
            self._given_up = False
            self._up.clear()
            self._running = self._spawn(self._run())

    def drop(self, task: str) -> None:
        """Keep no planner for `task` any longer."""
        self._tasks.pop(task, None)
        if not self._tasks and self._running is not None:
            self._running.cancel()
            self._running = None

    async def ask(
        self,
        method: Callable[Concatenate[PlannerActor, Asked], Awaitable[Answer]],
        *arguments: Asked.args,
        **named: Asked.kwargs,
    ) -> Answer:
        """Call `method` of the planner there is.

        Raises:
            PlannerGone: there is none, or it dies.
            Exception: what `method` raises.
        """
        actor = self._actor
        if actor is None:
            raise PlannerGone("it has not started yet")
        try:
            return await getattr(actor, method.__name__).remote(*arguments, **named)
        except RayTaskError as error:
            raise error.cause from error
        except RayActorError as error:
            if actor is self._actor:
                self._up.clear()
            raise PlannerGone(reason_of(error)) from error

    async def answer(
        self,
        method: Callable[Concatenate[PlannerActor, Asked], Awaitable[Answer]],
        *arguments: Asked.args,
        **named: Asked.kwargs,
    ) -> Answer:
        """`ask`, and where there is no planner yet or it dies, ask the next one.

        Raises:
            PlannerGone: no other is started, or `LIVES` died of the question.
            Exception: what `method` raises.
        """
        for _ in range(LIVES):
            await self._up.wait()
            with suppress(PlannerGone):
                return await self.ask(method, *arguments, **named)
        raise PlannerGone("no other is started" if self._given_up else f"{LIVES} died of the question")

    async def _run(self) -> None:
        try:
            for left in reversed(range(LIVES)):
                try:
                    await self._live()
                except RayError as error:
                    self._warn(f"died: {reason_of(error)}", last=left == 0)
        except Exception as error:  # a bug of ours costs what is planned, not the job
            self._warn(f"failed: {type(error).__name__}: {error}", last=True)
        finally:
            self._end()
        self._given_up = True
        self._up.set()

    async def _live(self) -> None:
        """Run one planner up to the error that ends it."""
        self._end()
        remote: Any = ray.remote(PlannerActor)
        node = ray.get_runtime_context().get_node_id()
        here = NodeAffinitySchedulingStrategy(node, soft=False)
        actor = remote.options(num_cpus=0, max_restarts=0, scheduling_strategy=here).remote(self._start())
        home: PlannerHome = await actor.home.remote()
        self._actor, self.lives = actor, self.lives + 1
        tasks = ", ".join(sorted(self._tasks))
        self._post(Noted(PlannerStarted(life=self.lives, node=home.node, pid=home.pid, of=tasks)))
        self._up.set()
        await actor.stay.remote()

    def _end(self) -> None:
        self._up.clear()
        if self._actor is not None:
            ray.kill(self._actor)
        self._actor = None

    def _warn(self, what: str, *, last: bool) -> None:
        kept = " and ".join(otherwise() for _, otherwise in sorted(self._tasks.items()))
        then = f"no other is started, and the job {kept}" if last else "another one takes its place"
        self._post(Noted(Warned(text=f"the planner {what}; {then}")))


def reason_of(error: Exception) -> str:
    """Ray's reason for a death in one line."""
    text = str(error).strip()
    if isinstance(error, RayActorError) and "creation task" not in text:
        return "killed, out of memory, or its node is gone"
    return text.splitlines()[-1] if text else type(error).__name__
