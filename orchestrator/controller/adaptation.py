"""Moves layers away from ranks that have become slow, while the job trains.

What counts as a change of speed, and whether another cut pays, is decided in `planner/adapt/`; here observations are
passed on, changes and decisions logged, and moves begun. Runs on the controller's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from orchestrator.controller.config import ControllerConfig
from orchestrator.controller.current_replanner import CurrentReplanner
from orchestrator.controller.event_loop import EventLoop
from orchestrator.controller.freeze_request import GRACE_STEPS
from orchestrator.controller.move_request import domains_of
from orchestrator.events.types import Adapted, Event, Formed, Migrated, SpeedsChanged, Warned
from orchestrator.history.job_view import JobView
from orchestrator.lifecycle.states import Job, Training
from orchestrator.lifecycle.stimuli import Noted
from planner.adapt.adviser import Adviser
from planner.adapt.policy import Decision, decide
from planner.adapt.speeds import Slowdowns
from planner.observed import StepTimes
from planner.plan import Plan
from workers.protocol import JobError

MATERIAL = 1.05
"""Factor by which a slowdown must change for plans to be made anew."""
SOONEST_STEPS = 8
"""Steps before a decision against a move is taken anew because the speeds have lasted longer than expected."""
SAID_REFUSALS = 3
"""How many observations that make no sense are warned of, for each rank."""


class Adaptation:
    """The adaptation of one job while its controller lives.

    Args:
        view: returns the job's view, with everything that is logged.
        planning: gets the slowdowns, for every plan that is made.
        migrate: has the training ranks follow another plan in the same places.
    """

    def __init__(
        self,
        setup: ControllerConfig,
        loop: EventLoop,
        view: Callable[[], JobView],
        planning: CurrentReplanner,
        migrate: Callable[[Plan], Coroutine[Any, Any, str]],
    ) -> None:
        self._steps = setup.config.steps
        self._freeze = setup.config.freeze
        self._loop = loop
        self._view = view
        self._planning = planning
        self._migrate = migrate
        self._adviser: Adviser | None = None
        if setup.config.adapt.policy != "off" and setup.profile is not None:
            self._adviser = Adviser(setup.profile)
        self._told = Slowdowns()
        """As logged last."""
        self._due = False
        """Whether a decision waits for the move under way, or for the freeze program."""
        self._again_at: int | None = None
        """The step at which to decide again, if the speeds lasted too short for a move so far."""
        self._deciding: asyncio.Task[None] | None = None
        self._refused: dict[int, int] = {}

    def go_on(self) -> None:
        """Know what the previous controller knew, from the log."""
        if self._adviser is not None:
            self._told = Slowdowns(tuple(self._view().adapt.known))
            self._adviser = self._adviser.with_known(self._told)
            self._planning.set(known=self._told)
            self._due = True

    def observe(self, batch: Sequence[StepTimes]) -> None:
        """Take what ranks observed; without training ranks nobody needs it."""
        state = self._loop.state
        if self._adviser is None or not isinstance(state, Training):
            return
        changes = [said for observed in batch if (said := self._take(self._adviser, observed, state.job))]
        self._tell(state.job, changes)
        if self._due or (self._again_at is not None and state.job.progress.step >= self._again_at):
            self._consider()

    def take(self, event: Event) -> None:
        """Follow a logged event."""
        state = self._loop.state
        if self._adviser is None or not isinstance(event, Formed | Migrated):
            return
        if isinstance(event, Formed) and isinstance(state, Training):
            self._adviser.keep(state.job.membership.alive, [state.job.progress.plan])
        self._due = True

    def _take(self, adviser: Adviser, observed: StepTimes, job: Job) -> str | None:
        """Learn from one observation; return the change that it completes, in words."""
        migration = job.intents.migration
        coming = () if migration is None else migration.path[:1]
        change, ignored = adviser.take(observed, (job.progress.plan, *coming), job.membership.members)
        if ignored is not None and not ignored.usual:
            times = self._refused[observed.rank] = self._refused.get(observed.rank, 0) + 1
            if times <= SAID_REFUSALS:
                self._loop.post(Noted(Warned(text=ignored.reason)))
        if change is None or change.before is None:
            return None
        return f"rank {observed.rank} {change.reason}"

    def _tell(self, job: Job, changes: Sequence[str]) -> None:
        """Log speeds that have changed, and plan with them from now on."""
        assert self._adviser is not None
        known = self._adviser.known.among(job.membership.members)
        complete = len(known.by_rank) == len(job.membership.members)
        if not complete or not known.far_from(self._told.among(job.membership.members), MATERIAL):
            return
        self._told = self._adviser.known
        self._planning.set(known=self._told)
        event = SpeedsChanged(
            step=job.progress.step,
            slowdowns=self._told.by_rank,
            changes=tuple(changes),
            lasting_steps=self._adviser.lasting_steps(job.progress.step),
        )
        self._loop.post(Noted(event))
        self._due = True

    def _consider(self) -> None:
        """Decide whether to move, unless something else is under way: then later."""
        state = self._loop.state
        if self._deciding is not None or not isinstance(state, Training) or not self._free(state.job):
            return
        known = self._told.among(state.job.membership.members)
        self._due, self._again_at = False, None
        if known.by_rank:
            self._deciding = self._loop.spawn(self._decide(known))

    def _free(self, job: Job) -> bool:
        """Whether nothing else changes the plan. A cut that changed while steps are monitored would void their times,
        and with them the freeze ratios."""
        intents, phases = job.intents, self._freeze.phases
        if intents.migration is not None or intents.moves or intents.asked is not None or intents.stopping:
            return False
        return phases is None or job.progress.step > phases.monitoring + GRACE_STEPS

    async def _decide(self, known: Slowdowns) -> None:
        try:
            await self._decide_once(known)
        finally:
            self._deciding = None

    async def _decide_once(self, known: Slowdowns) -> None:
        state = self._loop.state
        if not isinstance(state, Training):
            return
        assert self._adviser is not None
        job = state.job
        now, step = job.progress.plan, job.progress.step
        decision = await asyncio.to_thread(
            decide,
            self._planning.replanner,
            now,
            domains_of(job),
            known.of(job.membership.members),
            remaining_steps=self._steps - step,
            lasting_steps=self._adviser.lasting_steps(step),
        )
        self._again_at = step + max(SOONEST_STEPS, self._adviser.age(step)) if decision.too_short else None
        self._loop.post(Noted(_adapted(decision, step)))
        if decision.plan is None:
            return
        try:
            await self._migrate(replace(decision.plan, reason=decision.reason))
        except JobError as error:
            self._loop.post(Noted(Warned(text=f"the layers do not move: {error}")))


def _adapted(decision: Decision, step: int) -> Adapted:
    return Adapted(
        step=step,
        moves=decision.plan is not None,
        reason=decision.reason,
        now_s=decision.now_s,
        then_s=decision.then_s,
        cost_s=decision.cost_s,
        layers=decision.layers,
    )
