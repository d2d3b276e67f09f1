"""Moves layers away from ranks that have become slow, while the job trains.

What counts as a change of speed, and whether another cut pays, is decided in `planner/adapt/`; here observations are
passed on, changes and decisions logged, and moves begun. Runs on the controller's event loop. Nothing here ends a job:
a bug of ours costs the adaptation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from orchestrator.controller.config import ControllerConfig
from orchestrator.controller.current_replanner import CurrentReplanner
from orchestrator.controller.event_loop import EventLoop
from orchestrator.controller.requests.freeze_request import monitors
from orchestrator.controller.requests.move_request import domains_of
from orchestrator.events.types import Adapted, Event, Formed, SpeedsChanged, Warned
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
"""Factor by which a slowdown must change for new plans to be made."""
SOONEST_STEPS = 8
"""Steps after a decision against a move, or a move that was refused, until the next decision."""
SAID_REFUSALS = 3
"""How many observations that make no sense are warned of, for each rank."""


class Adaptation:
    """The adaptation of one job while its controller lives.

    Args:
        view: returns the job's view, with everything that is logged.
        planning: gets the slowdowns, for every plan that is made.
        migrate: has the training ranks follow another plan in the same places, unless the job has changed since then.
    """

    def __init__(
        self,
        setup: ControllerConfig,
        loop: EventLoop,
        view: Callable[[], JobView],
        planning: CurrentReplanner,
        migrate: Callable[[Plan, Job], Coroutine[Any, Any, str]],
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
        self._changes: list[str] = []
        """Changes that are not logged yet, in words."""
        self._due = False
        """Whether a decision waits for the move under way, or for the freeze program."""
        self._again_at: int | None = None
        """The step at which to decide again, if the speeds lasted too short for a move so far, or it was refused."""
        self._deciding: asyncio.Task[None] | None = None
        self._refused: dict[int, int] = {}

    def go_on(self) -> None:
        """Know what the previous controller knew, from the log."""
        if self._adviser is not None:
            record = self._view().adapt
            self._told = Slowdowns(tuple(record.known))
            self._adviser = self._adviser.with_known(self._told, record.since)
            self._planning.set(known=self._told)
            self._due = True

    def observe(self, batch: Sequence[StepTimes]) -> None:
        """Take what ranks observed; without training ranks nobody needs it."""
        state = self._loop.state
        if self._adviser is None or not isinstance(state, Training):
            return
        for observed in batch:
            self._take(self._adviser, observed, state.job)
        self._tell(self._adviser, state.job)
        if self._due or (self._again_at is not None and state.job.progress.step >= self._again_at):
            self._consider(self._adviser, state.job)

    def take(self, event: Event) -> None:
        """Follow a logged event. After a move there is nothing to decide until a speed changes: a move that somebody
        requested stays."""
        state = self._loop.state
        if self._adviser is not None and isinstance(event, Formed) and isinstance(state, Training):
            self._adviser.keep(state.job.membership.alive)
            self._due = True

    def _take(self, adviser: Adviser, observed: StepTimes, job: Job) -> None:
        migration = job.intents.migration
        coming = () if migration is None else migration.path[:1]
        change, ignored = adviser.take(observed, (job.progress.plan, *coming), job.membership.members)
        if ignored is not None and not ignored.usual:
            times = self._refused[observed.rank] = self._refused.get(observed.rank, 0) + 1
            if times <= SAID_REFUSALS:
                self._loop.post(Noted(Warned(text=ignored.reason)))
        if change is not None and change.before is not None:
            self._changes.append(f"rank {observed.rank} {change.reason}")

    def _tell(self, adviser: Adviser, job: Job) -> None:
        """Log speeds that have changed, and plan with them from now on."""
        members = job.membership.members
        known = adviser.known.among(members)
        if len(known.by_rank) < len(members) or not known.far_from(self._told.among(members), MATERIAL):
            return
        changes, self._changes = tuple(self._changes), []
        self._told = adviser.known
        self._planning.set(known=self._told)
        step = job.progress.step
        event = SpeedsChanged(
            step=step,
            slowdowns=known.by_rank,
            changes=changes,
            lasting_steps=adviser.lasting_steps(step),
            since=step - adviser.age(step),
        )
        self._loop.post(Noted(event))
        self._due = True

    def _consider(self, adviser: Adviser, job: Job) -> None:
        """Decide whether to move, unless something else is under way: then later."""
        intents, known = job.intents, self._told.among(job.membership.members)
        busy = intents.migration is not None or intents.moves or intents.asked is not None or intents.stopping
        if self._deciding is not None or busy or monitors(self._freeze, self._view()):
            return
        self._due, self._again_at = False, None
        if known.by_rank:
            self._deciding = self._loop.spawn(self._decide(adviser, job, known))

    async def _decide(self, adviser: Adviser, job: Job, known: Slowdowns) -> None:
        try:
            await self._decide_once(adviser, job, known)
        except Exception as error:  # a bug of ours costs the adaptation, not the job
            self._adviser = None
            why = f"{type(error).__name__}: {error}"
            self._loop.post(
                Noted(Warned(text=f"the adaptation failed ({why}): the job trains on with its cut"))
            )
        finally:
            self._deciding = None

    async def _decide_once(self, adviser: Adviser, job: Job, known: Slowdowns) -> None:
        step = job.progress.step
        decision = await asyncio.to_thread(
            decide,
            self._planning.replanner,
            job.progress.plan,
            domains_of(job),
            known.of(job.membership.members),
            remaining_steps=self._steps - step,
            lasting_steps=adviser.lasting_steps(step),
        )
        if decision.too_short:
            self._again_at = step + max(SOONEST_STEPS, adviser.age(step))
        refused = ""
        if decision.plan is not None:
            try:
                await self._migrate(replace(decision.plan, reason=decision.reason), job)
            except JobError as error:
                # Perhaps for good, such as for the memory of the plans in between: not at every step again.
                refused = str(error)
                self._again_at = step + SOONEST_STEPS
        self._loop.post(Noted(_adapted(decision, step, refused)))


def _adapted(decision: Decision, step: int, refused: str) -> Adapted:
    return Adapted(
        step=step,
        moves=decision.plan is not None and not refused,
        reason=f"{decision.reason}; but {refused}" if refused else decision.reason,
        now_s=decision.now_s,
        then_s=decision.then_s,
        cost_s=decision.cost_s,
        layers=decision.layers,
    )
