"""Has plans keep within the memory that ranks turned out to have, and moves layers away before an allocation fails.

How much that is, and which cut keeps to it, is decided in `planner/adapt/memory_pressure.py`; here it is passed on to
every plan, logged, and carried out. Runs on the controller's event loop. Nothing here ends a job.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from orchestrator.controller.config import ControllerConfig
from orchestrator.controller.event_loop import EventLoop
from orchestrator.controller.planning.current_replanner import CurrentReplanner
from orchestrator.controller.requests.freezing_in_force import open_monitoring
from orchestrator.controller.requests.move_request import domains_of
from orchestrator.events.types import Event, MemoryLimited, OutOfMemory, Warned
from orchestrator.history.job_view import JobView
from orchestrator.lifecycle.states import JobData, Training
from orchestrator.lifecycle.stimuli import Noted
from planner.adapt.memory_pressure import limit_after_failure, limit_after_fall, relieve
from planner.plan import Plan
from planner.search.recomputing import every_recompute
from workers.protocol.errors import JobError
from workers.protocol.reports import MemoryLow, StepReport


class MemoryRelief:
    """The memory of one job's ranks while its controller lives.

    Args:
        view: returns the job's view, with everything that is logged.
        planning: gets the limits, for every plan that is made.
        migrate: has the training ranks follow another plan in the same places, unless the job has changed since then.
        moved: called once a move in haste has begun: a plan within the same limits may be better.
    """

    def __init__(
        self,
        setup: ControllerConfig,
        loop: EventLoop,
        view: Callable[[], JobView],
        planning: CurrentReplanner,
        migrate: Callable[[Plan, JobData], Coroutine[Any, Any, str]],
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        self._shares_host = setup.config.device != "cuda"
        self._freeze = setup.config.freeze
        self._loop = loop
        self._view = view
        self._planning = planning
        self._migrate = migrate
        self._moved = moved
        self._due = False
        """Whether a move waits for the one under way, or for the freeze program."""
        self._moving: asyncio.Task[None] | None = None

    def go_on(self) -> None:
        """Know what the previous controller knew, from the log."""
        known = self._view().memory
        self._planning.set_memory(limits=known.limits, recompute=self._all() if known.recompute else None)

    def fold(self, event: Event) -> None:
        """Follow a logged event: once this returns, plans are made with what it tells."""
        match event:
            case OutOfMemory():
                self._failed(event)
            case MemoryLow():
                self._fell(event)
            case StepReport() if self._due:
                self._relieve()
            case _:
                pass

    def _failed(self, short: OutOfMemory) -> None:
        failed = self._plan(short.plan)
        if failed is None:
            return
        held = short.shortage.held_bytes
        limit = limit_after_failure(self._planning.replanner, failed, short.place, held)
        if limit is None:
            reason = "without a profile of the job, a smaller plan is the one in which all layers recompute"
            self._planning.set_memory(recompute=self._all())
            event = MemoryLimited(rank=short.rank, limit_bytes=None, reason=reason, step=short.step)
            self._loop.post(Noted(event))
        else:
            version = f"{failed.epoch}.{failed.version}"
            self._limit(short.rank, limit, f"plan {version} took more than it has", short.step)

    def _fell(self, low: MemoryLow) -> None:
        now, state = self._plan(low.plan), self._loop.state
        if now is None or not isinstance(state, Training):
            return
        nodes = state.job.membership.nodes
        sharing = Counter(nodes.get(rank, "") for rank in state.job.membership.members)
        lacking = low.reserve_bytes - low.left_bytes
        if self._shares_host:
            # Each of the ranks on the host sees the same fall, and gives up a part.
            lacking = -(-lacking // max(1, sharing[nodes.get(low.rank, "")]))
        limit = limit_after_fall(self._planning.replanner, now, low.place, lacking)
        if limit is not None:
            left, kept = f"{low.left_bytes:,}", f"{low.reserve_bytes:,}"
            reason = (
                f"{left} bytes are left of its device's memory, and {kept} should be (adapt.memory_reserve)"
            )
            self._limit(low.rank, limit, reason, low.step - 1)
            self._due = True
            self._relieve()

    def _limit(self, rank: int, limit: int, reason: str, step: int) -> None:
        limit = min(limit, self._planning.limits.get(rank, limit))
        self._planning.set_memory(limits={**self._planning.limits, rank: limit})
        self._loop.post(Noted(MemoryLimited(rank=rank, limit_bytes=limit, reason=reason, step=step)))

    def _relieve(self) -> None:
        """Begin to move layers away, unless something else is under way: then later."""
        state = self._loop.state
        if not isinstance(state, Training) or self._moving is not None:
            return
        intents = state.job.intents
        busy = intents.migration is not None or intents.moves or intents.asked is not None or intents.stopping
        if not busy and open_monitoring(self._freeze, self._view()) is None:
            self._due = False
            self._moving = self._loop.spawn(self._move(state.job))

    async def _move(self, job: JobData) -> None:
        try:
            members = job.membership.members
            plan, reason = await asyncio.to_thread(
                relieve,
                self._planning.of(members),
                job.progress.plan,
                domains_of(job),
                self._planning.known.of(members),
            )
            if plan is None:
                self._warn(f"no layers move for want of memory: {reason}")
            else:
                await self._migrate(replace(plan, reason=reason), job)
                self._moved()
        except JobError as error:
            self._warn(f"no layers move for want of memory: {error}")
        except Exception as error:  # a bug of ours costs the relief, not the job
            self._warn(f"the relief of memory failed ({type(error).__name__}: {error}): the job trains on")
        finally:
            self._moving = None

    def _warn(self, text: str) -> None:
        self._loop.post(Noted(Warned(text=text)))

    def _plan(self, key: tuple[int, int]) -> Plan | None:
        """The plan with this epoch and version, if it was issued not long ago."""
        plans = [decision.plan for decision in self._view().decisions]
        return next((plan for plan in reversed(plans) if plan.key == key), None)

    def _all(self) -> tuple[int, ...]:
        return every_recompute(self._planning.replanner.first)
