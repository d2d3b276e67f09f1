"""Moves layers away from ranks that have become slow, while the job trains.

What counts as a change of speed, and whether another cut pays, is the planner's to say (`planner/adapt/`); here
observations are passed on to it, changes and decisions logged, and moves begun. Runs on the controller's event loop.
Nothing here ends a job: a bug of ours costs the adaptation.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from orchestrator.controller.adapt.sample_thinning import Thinning
from orchestrator.controller.config import ControllerConfig
from orchestrator.controller.event_loop import EventLoop
from orchestrator.controller.planning.current_replanner import CurrentReplanner
from orchestrator.controller.planning.planner_process import PlannerGone, PlannerProcess
from orchestrator.controller.requests.freezing_in_force import open_monitoring
from orchestrator.controller.requests.move_request import domains_of
from orchestrator.events.types import (
    Adapted,
    Event,
    Formed,
    LayersTimed,
    LinksTimed,
    SpeedsChanged,
    Warned,
)
from orchestrator.history.folder import JobFolder
from orchestrator.history.job_view import JobView
from orchestrator.lifecycle.migration import Mode
from orchestrator.lifecycle.states import JobData, Training
from orchestrator.lifecycle.stimuli import Noted
from planner.actor import PlannerActor
from planner.adapt.live import Heard, LiveStart, Question
from planner.adapt.policy import MoveDecision
from planner.adapt.speeds import RankSlowdowns
from planner.course import Course
from planner.freezing import Ratios
from planner.observed import StepTimes
from planner.plan import Plan
from planner.search.replan import Replanner
from workers.protocol.errors import JobError

MATERIAL = 1.05
"""Factor by which a slowdown must change for new plans to be made."""
SOONEST_STEPS = 8
"""Steps after a decision against a move, or a move that was refused, until the next decision."""
SAID_REFUSALS = 8
"""Most warnings per rank about observations that make no sense: each planner warns once of each kind."""
TASK = "speeds"
"""Task of the planner, by its name in the log."""
WAITING = 4096
"""Most observations that wait for the planner; older ones are dropped."""


class Adaptation:
    """The adaptation of one job while its controller lives.

    Args:
        view: returns the job's view, with everything that is logged.
        planning: gets the slowdowns, for every plan that is made.
        migrate: has the training ranks follow another plan in the same places, unless the job has changed since then;
            in a mode, or as the spec says.
        planner: of the job; begins with `live_start`.
        solve_again: has the freeze program solved for the ranks' speeds and cut as they are.
        budget: r_max of that program; None: there is none.
    """

    def __init__(
        self,
        setup: ControllerConfig,
        loop: EventLoop,
        view: Callable[[], JobView],
        planning: CurrentReplanner,
        migrate: Callable[[Plan, JobData, Mode | None], Coroutine[Any, Any, str]],
        planner: PlannerProcess,
        solve_again: Callable[[], None] = lambda: None,
        budget: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._setup = setup
        self._freeze = setup.config.freeze
        self._loop = loop
        self._view = view
        self._planning = planning
        self._migrate = migrate
        self._solve_again = solve_again
        self._budget = budget
        self._planner = planner if adapts(setup) else None
        self._epoch_steps = setup.config.adapt.epoch_steps if setup.config.adapt.policy == "epoch" else None
        """Steps from one change of plan to the next, of the batch that the job begins with; None: any step will do."""
        self._mode: Mode | None = None if self._epoch_steps is None else "stop"
        self._epoch: int | None = None
        """The newest epoch that was looked at."""
        self._waiting: deque[StepTimes | tuple[int, ...]] = deque(maxlen=WAITING)
        """Observations, and between them the ranks of each new generation."""
        self._pump: asyncio.Task[None] | None = None
        self._heard: Heard | None = None
        """Newest known state of the planner."""
        self._told = RankSlowdowns()
        """Slowdowns as logged last."""
        self._changes: list[str] = []
        """Changes that are not logged yet, in words."""
        self._due = False
        """Whether a decision waits for the move under way, for the freeze program, or for what other ranks report."""
        self._reported: dict[int, int] = {}
        """Rank -> the newest step of which the planner has its times."""
        self._awaited: int | None = None
        """The step of which all ranks' times are waited for, since a decision is due; None: none is."""
        self._again_at: int | None = None
        """The step at which to decide again, if the speeds lasted too short for a move so far, or it was refused."""
        self._deciding: asyncio.Task[None] | None = None
        self._refused: dict[int, int] = {}
        self._thinning = Thinning()
        self._sent: tuple[int, Replanner] | None = None
        """(number of the planner, as `lives` counts, and the replanner sent to it last)."""

    def run(self) -> None:
        """Keep a planner from now on, if the job adapts."""
        if self._planner is None:
            return
        if self._setup.config.adapt.policy == "forest" and self._setup.forest is None:
            text = 'adapt.policy = "forest" has no interference model here: the planner goes by measured slowdowns'
            self._loop.post(Noted(Warned(text=text)))
        self._keep(self._planner)

    def _keep(self, planner: PlannerProcess) -> None:
        planner.keep(TASK, lambda: "trains on with its cut")

    def go_on(self) -> None:
        """Know what the previous controller knew, from the log."""
        if self._planner is not None:
            record = self._view().adapt
            self._told = RankSlowdowns(record.known)
            self._planning.set_speeds(known=self._told, factors=record.factors, links=record.links)
            self._due = True

    def observe(self, batch: Sequence[StepTimes]) -> None:
        """Take what ranks observed; without training ranks nobody needs it."""
        if self._planner is not None and isinstance(self._loop.state, Training):
            self._thinning.see(batch)
            self._waiting.extend(batch)
            self._go()

    def fold(self, event: Event) -> None:
        """Follow a logged event. After a move there is nothing to decide until a speed changes: a move that somebody
        requested stays; `freeze_control.py` has the freeze program solved for it."""
        state = self._loop.state
        if self._planner is None or not isinstance(state, Training):
            return
        if isinstance(event, Formed):
            self._keep(self._planner)
            self._waiting.append(tuple(sorted(state.job.membership.alive)))
            self._due = True

    def decide_again(self) -> None:
        """The cut has changed in haste: once that move is over, decide whether another plan is better."""
        self._due = True

    async def idle(self) -> None:
        """Wait until the planner has taken everything that waits for it."""
        while self._pump is not None:
            await asyncio.shield(self._pump)

    def _go(self) -> None:
        if self._pump is None and self._waiting:
            self._pump = self._loop.spawn(self._pass_on())

    async def _pass_on(self) -> None:
        try:
            while self._waiting and self._planner is not None:
                await self._guarded(self._pass_one(self._planner))
        finally:
            self._pump = None

    async def _pass_one(self, planner: PlannerProcess) -> None:
        """Pass on what waits, up to the next generation's beginning."""
        first = self._waiting.popleft()
        if isinstance(first, tuple):
            self._reported, self._awaited = {}, None
            await planner.ask(PlannerActor.keep, first)
            return
        batch: list[StepTimes] = [first]
        while self._waiting and not isinstance(self._waiting[0], tuple):
            batch.append(self._waiting.popleft())  # pyright: ignore[reportArgumentType]
        state = self._loop.state
        if not isinstance(state, Training):
            return
        migration = state.job.intents.migration
        coming = () if migration is None else migration.path[:1]
        members = state.job.membership.members
        plans = (state.job.progress.plan, *coming)
        heard = await planner.ask(PlannerActor.observe, batch, plans, members)
        self._reported |= {times.rank: times.step for times in batch}
        self._hear(heard)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """A bug of ours costs the adaptation, not the job; and what a dead planner does not take is lost."""
        try:
            await work
        except PlannerGone:
            return
        except Exception as error:
            if self._planner is not None:
                self._planner.drop(TASK)
            self._planner = None
            why = f"{type(error).__name__}: {error}"
            self._loop.post(
                Noted(Warned(text=f"the adaptation failed ({why}): the job trains on with its cut"))
            )

    def _hear(self, heard: Heard) -> None:
        """Log what is new, and have it decided upon."""
        state = self._loop.state
        if not isinstance(state, Training):
            return
        self._heard = heard
        for rank, why in heard.ignored:
            times = self._refused[rank] = self._refused.get(rank, 0) + 1
            if times <= SAID_REFUSALS:
                self._loop.post(Noted(Warned(text=why)))
        for warning in heard.warnings:
            self._loop.post(Noted(Warned(text=warning)))
        self._changes += heard.changes
        if heard.factors:
            self._planning.set_speeds(factors=heard.factors)
            self._loop.post(Noted(LayersTimed(step=state.job.progress.step, factors=heard.factors)))
            self._due = True
        if heard.links is not None:
            self._planning.set_speeds(links=heard.links)
            told = LinksTimed(step=state.job.progress.step, links=heard.links, changes=heard.link_changes)
            self._loop.post(Noted(told))
            self._due = True
        self._tell(heard, state.job)
        sampled = self._thinning.due(time.monotonic(), state.job.progress.step, dict(heard.newest))
        if sampled is not None:
            self._loop.post(Noted(sampled))
        step = state.job.progress.step
        if not self._turn(step) or not (self._due or (self._again_at is not None and step >= self._again_at)):
            return
        newest = max(self._reported.values(), default=0)
        if self._awaited is None:
            self._awaited = newest
        # What slows one rank down may slow down others: all tell of that step, or somebody tells of a later one.
        members = state.job.membership.members
        lacking = any(self._reported.get(rank, 0) < newest for rank in members)
        if self._epoch_steps is not None or newest > self._awaited or not lacking:
            self._consider(heard, state.job)

    @property
    def _course(self) -> Course:
        """The course of the job's batch, as far as it is known."""
        return self._setup.config.course(self._view().legs)

    def _turn(self, step: int) -> bool:
        """Whether plans may change after `step`."""
        if self._epoch_steps is None:
            return True
        epoch, before = int(self._course.along(step)) // self._epoch_steps, self._epoch
        if before is None or epoch > before:
            self._epoch = epoch
        return before is not None and epoch > before

    def _tell(self, heard: Heard, job: JobData) -> None:
        """Log speeds that have changed, and plan with them from now on."""
        members = job.membership.members
        known = heard.known.among(members)
        if len(known.by_rank) < len(members) or not known.far_from(self._told.among(members), MATERIAL):
            return
        changes, self._changes = tuple(self._changes), []
        step = job.progress.step
        self._told = heard.known
        self._planning.set_speeds(known=self._told)
        event = SpeedsChanged(
            step=step,
            slowdowns=known.by_rank,
            changes=changes,
            lasting_steps=heard.lasting_steps,
            since=step - heard.age,
            past=heard.past,
        )
        self._loop.post(Noted(event))
        self._due = True

    def _consider(self, heard: Heard, job: JobData) -> None:
        """Decide whether to move, unless something else is under way: then later."""
        intents, known = job.intents, self._told.among(job.membership.members)
        busy = intents.migration is not None or intents.moves or intents.asked is not None or intents.stopping
        monitors = open_monitoring(self._freeze, self._view()) is not None
        if self._deciding is not None or busy or monitors:
            return
        self._due, self._again_at, self._awaited = False, None, None
        if known.by_rank and self._planner is not None:
            self._deciding = self._loop.spawn(self._decide(self._planner, heard, job))

    async def _decide(self, planner: PlannerProcess, heard: Heard, job: JobData) -> None:
        try:
            await self._guarded(self._decide_once(planner, heard, job))
        finally:
            self._deciding = None

    async def _decide_once(self, planner: PlannerProcess, heard: Heard, job: JobData) -> None:
        step = job.progress.step
        question = Question(
            now=job.progress.plan,
            domains=tuple(domains_of(job)),
            members=job.membership.members,
            step=step,
            remaining_steps=self._course.last_step(self._setup.config.job.steps) - step,
            ratios=self._ratios(job),
            r_max=self._budget(),
        )
        try:
            await self._bring_replanner(planner, job.membership.members)
            decision = await planner.ask(PlannerActor.decide, question)
        except PlannerGone:
            self._due = True
            raise
        if decision.too_soon:
            self._again_at = step + max(SOONEST_STEPS, heard.age)
        refused = ""
        if decision.plan is not None:
            try:
                await self._migrate(replace(decision.plan, reason=decision.reason), job, self._mode)
            except JobError as error:
                # Perhaps for good, such as for the memory of the plans in between: not at every step again.
                refused = str(error)
                self._again_at = step + SOONEST_STEPS
        self._loop.post(Noted(_adapted(decision, step, refused)))
        if decision.plan is None or refused:
            self._solve_again()

    def _ratios(self, job: JobData) -> Ratios | None:
        """The freeze ratios that the ranks follow, in the stable phase; None: they follow none."""
        adopted = [plan for plan in job.progress.freeze if plan.start is not None and plan.ratios]
        return adopted[-1].ratios if adopted else None

    async def _bring_replanner(self, planner: PlannerProcess, members: Sequence[int]) -> None:
        """Have the planner plan with the job's present replanner for `members`."""
        replanner = self._planning.of(members)
        if self._sent is None or self._sent[0] != planner.lives or self._sent[1] is not replanner:
            # A copy, without the answers that it remembers.
            await planner.ask(PlannerActor.plan_with, replace(replanner))
            self._sent = planner.lives, replanner


def adapts(setup: ControllerConfig) -> bool:
    """Whether the job's plans follow the ranks' speeds."""
    return setup.config.adapt.policy != "off" and setup.profile is not None


def live_start(setup: ControllerConfig, view: JobView) -> LiveStart | None:
    """Initial state of the planner of a job that adapts; None: it does not."""
    if not adapts(setup):
        return None
    assert setup.profile is not None
    known, config = view.adapt, setup.config
    return LiveStart(
        profile=setup.profile,
        known=RankSlowdowns(known.known),
        past=known.past,
        factors=known.factors,
        links=known.links,
        forest=setup.forest,
        record=str(JobFolder(config.job.folder).planner_path) if config.adapt.record else None,
    )


def _adapted(decision: MoveDecision, step: int, refused: str) -> Adapted:
    return Adapted(
        step=step,
        moves=decision.plan is not None and not refused,
        reason=f"{decision.reason}; but {refused}" if refused else decision.reason,
        now_s=decision.now_s,
        then_s=decision.then_s,
        cost_s=decision.cost_s,
        layers=decision.layers,
    )
