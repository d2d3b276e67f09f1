"""The controller's side of freezing: the planner beside the job, and requests to change the settings.

What a request takes is decided in `freeze_request.py`; here it is solved, logged and sent. Runs on the controller's
event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from orchestrator.commands.entry import CommandEntry
from orchestrator.commands.freeze import Freeze
from orchestrator.controller.config import ControllerConfig
from orchestrator.controller.event_loop import EventLoop
from orchestrator.controller.freeze.freeze_watch import Costly
from orchestrator.controller.freeze.method_choice import chooses, chosen, due, settings_of
from orchestrator.controller.freeze.planner_link import TASK, PlannerLink, link_planner, solution_of
from orchestrator.controller.planning.current_replanner import CurrentReplanner
from orchestrator.controller.planning.planner_process import PlannerProcess
from orchestrator.controller.requests.freeze_request import (
    Running,
    Solve,
    WantedFreezing,
    decided,
    described,
    plan_of,
    question_for_new_times,
)
from orchestrator.controller.requests.freezing_in_force import budget_in_force, method_to_plan_for
from orchestrator.controller.requests.move_request import domains_of
from orchestrator.controller.requests.partition_request import check_base
from orchestrator.events.types import (
    Event,
    Formed,
    FreezeChanged,
    FreezeSolved,
    Migrated,
    Submitted,
    Warned,
)
from orchestrator.history.copying import copied
from orchestrator.history.job_view import JobView
from orchestrator.lifecycle.moves import expected
from orchestrator.lifecycle.states import JobData, Live, Order, Training, in_words
from orchestrator.lifecycle.stimuli import FreezeAsked, Noted, Solved
from planner.freeze.decision import FreezeDecision, FreezeQuestion, decide
from planner.freeze.monitoring import Observation
from planner.freezing import AUTO, Budget, Ratios, prefix_rule, works_above_prefix
from workers.protocol.errors import JobError
from workers.protocol.reports import FreezeStarted, PrefixFrozen

MOST_UPDATE = 0.98
"""Least update above which nothing is frozen any more."""
MATERIAL = 0.02
"""Share of a weight gradient by which a ratio must differ for ranks to adopt new ones."""


class FreezeControl:
    """The freezing of one job while its controller lives.

    Args:
        view: returns the job's view, with everything that is logged.
        planning: gets the freeze method for whose copies plans need memory.
        planner: of the job.
    """

    def __init__(
        self,
        order: Order,
        setup: ControllerConfig,
        loop: EventLoop,
        view: Callable[[], JobView],
        planning: CurrentReplanner,
        planner: PlannerProcess,
    ) -> None:
        self._order = order
        self._setup = setup
        self._loop = loop
        self._view = view
        self._current = planning
        self._planner = planner
        self._link: PlannerLink | None = None
        self._planning: asyncio.Task[None] | None = None
        self._version = 0
        """Version of this controller's newest freeze plan, even if it is still being solved."""
        self._changing = asyncio.Lock()
        """Held by a request until it is logged: the next one is decided on what it changed."""
        self._outdated = False
        """Whether speeds, times or layers have changed since the freeze program was solved for them last."""
        self._solving: asyncio.Task[None] | None = None
        self._solved_above: int | None = None
        """Layers frozen as a whole when the newest solution was logged; None: not since this controller lives."""

    def fold(self, event: Event) -> None:
        """Follow a logged event."""
        if isinstance(event, Migrated):
            self.accompany(event.step)
        if self._link is not None:
            self._link.fold(event)
        if isinstance(event, Submitted | FreezeChanged | FreezeStarted):
            replayed = self._order.freezing.plans if self._order.freezing.replayed else ()
            self._current.set_freezing(method=method_to_plan_for(self._view().freeze, replayed))
        if isinstance(event, FreezeStarted) and event.plan.control is not None:
            self._drop_link()
            if isinstance(self._loop.state, Live):
                self.accompany(self._view().step)
        again = isinstance(event, Migrated) or (isinstance(event, FreezeStarted) and self._outdated)
        if isinstance(event, PrefixFrozen | Formed) and self._above_prefix:
            monitored = isinstance(event, Formed) or (
                self._link is not None and self._link.monitors_with(event)
            )
            # A solution that is under way is followed first.
            self._outdated = self._outdated or not monitored
            again = self._budget_in_force() is not None
        if isinstance(event, FreezeSolved):
            self._solved_above = self._view().freeze.frozen_layers
        if again:
            self.solve_again()
        if due(event, self._setup.config.freeze, self._view()) and not self._order.freezing.replayed:
            self._loop.spawn(self._choose())

    def accompany(self, step: int) -> None:
        """Link a planner for the current plan, unless the one there is serves that plan too, or none is needed.

        Args:
            step: steps committed.
        """
        state = self._loop.state
        assert isinstance(state, Live)
        progress = state.job.progress
        if self._link is not None and self._link.serves(progress.plan):
            self._link.void_after(step)
            return
        self._drop_link()
        self._link = link_planner(
            self._planner,
            self._order,
            self._setup,
            progress.plan,
            progress.schedule,
            self._loop.post,
            view=self._view(),
            version=self._version + 1,
        )
        if self._link is None:
            self._planner.drop(TASK)
            return
        self._version += 1
        self._link.void_after(step)
        self._planning = self._loop.spawn(self._link.run(step))

    async def change(
        self, command: Freeze, *, still: Callable[[], bool] = lambda: True, reason: str = ""
    ) -> str:
        """Change the freeze settings at a commit; return in words what will happen.

        Args:
            still: whether the change is still wanted, asked once it is its turn.
            reason: why the job changes them itself; empty: someone else does.

        Raises:
            PlanChanged: it is for an older plan than the newest one.
            JobError: the job does not train, or what is asked for cannot be done or changes nothing.
        """
        async with self._changing:
            if not still():
                raise JobError("what freezes has changed meanwhile")
            check_base(self._training(), command.base)
            change = self._training().intents.change
            if change is not None and change.cause == "pack":
                raise JobError(
                    "the job's pipelines are being laid out anew for the layers that are frozen: ask again once they"
                    " train"
                )
            job = self._running(self._training())
            # Simulates: too long for the event loop.
            wanted = await asyncio.to_thread(
                decided,
                WantedFreezing(**command.model_dump(include=set(command.some)), chosen=bool(reason)),
                job,
            )
            solved = (
                await self._solved(wanted.question, wanted.observations)
                if isinstance(wanted, Solve)
                else None
            )
            # It may have ended meanwhile, or have another plan.
            check_base(self._training(), command.base)
            # Numbered only now: a planner that was linked while the program was solved has an older plan.
            self._drop_link()
            if wanted.control.phases is None or wanted.control.solved:  # nothing is left to solve
                self._planner.drop(TASK)
            self._version += 1
            key, solution = {"epoch": self._order.epoch, "version": self._version}, None
            if solved is not None:
                decision, solve_s = solved
                plan = decision.freeze_plan(job.plan, **key, control=wanted.control)
                solution = solution_of(decision, plan, solve_s)
            else:
                plan = plan_of(wanted.control, job.plan, **key)
            change = FreezeChanged(
                from_step=self._view().step + 1,
                method=wanted.control.method,
                r_max=wanted.control.r_max,
                by=command.by,
                plan=plan,
                id=command.key,
                reason=reason,
            )
            await self._loop.post_and_wait(FreezeAsked(change, solution))
        return described(wanted.control)

    async def freeze_less(self, costly: Costly) -> None:
        """Freezing costs more than it brings, and the job leaves it to us how much to freeze: freeze less, down to
        nothing."""
        least = 1.0 - (1.0 - costly.progress) / 2
        wanted: dict[str, Any] = {"least_update": round(least, 4)}
        if least > MOST_UPDATE:
            # A job that chooses its method may choose again.
            chooses_again = chooses(self._setup.config.freeze, self._view())
            # Prediction and outcome are of the program alone: what is frozen as a whole stays so.
            rest = prefix_rule(self._view().freeze.method) or "none"
            wanted = {"least_update": 1.0} if chooses_again else {"method": rest}
        judged = self._view().freeze.newest

        def still() -> bool:
            freeze = self._view().freeze
            return freeze.proposed is None and freeze.newest == judged

        try:
            await self.change(Freeze(by=AUTO, id="", **wanted), still=still, reason=costly.reason)
        except JobError as error:
            if still():
                self._loop.post(Noted(Warned(text=f"{costly.reason}, and goes on: {error}")))
        except Exception as error:  # a bug of ours costs the change, not the job
            why = f"{type(error).__name__}: {error}"
            self._loop.post(Noted(Warned(text=f"{costly.reason}, and goes on: {why}")))

    async def _choose(self) -> None:
        """The job chooses its method itself: have it freeze by what is best now."""
        state, judged = self._loop.state, self._view().freeze.newest
        if not isinstance(state, Training):
            return

        def still() -> bool:
            freeze = self._view().freeze
            return freeze.proposed is None and freeze.newest == judged

        try:
            best = await asyncio.to_thread(chosen, self._running(state.job))
            if best is not None and still():
                asked = Freeze(by=AUTO, id="", **settings_of(best))
                await self.change(asked, still=still, reason=best.reason)
        except (JobError, ValueError) as error:
            if still():
                self._loop.post(Noted(Warned(text=f"no other way to freeze was chosen: {error}")))
        except Exception as error:  # a bug of ours costs the choice, not the job
            text = f"no way to freeze was chosen ({type(error).__name__}: {error}): what is frozen stays"
            self._loop.post(Noted(Warned(text=text)))

    def solve_again(self) -> None:
        """Speeds, times or layers have changed: have the freeze program solved for them, if the ranks follow one, and
        have the ranks adopt ratios that differ. What is being solved is void, and a solution on its way to the ranks is
        adopted first."""
        self._outdated = True
        if self._solving is None or self._solving.done():
            self._solving = self._loop.spawn(self._solve_outdated())

    async def _solve_outdated(self) -> None:
        try:
            while self._outdated:
                async with self._changing:
                    if self._view().freeze.proposed is not None:
                        return
                    self._outdated = False
                    await self._solve_for_new_times()
        except Exception as error:  # a bug of ours costs the solution, not the job
            why = f"{type(error).__name__}: {error}"
            text = f"the freeze program was not solved again ({why}): what is frozen stays"
            self._loop.post(Noted(Warned(text=text)))

    async def _solve_for_new_times(self) -> None:
        state = self._loop.state
        if not isinstance(state, Training):
            return
        members = state.job.membership.members
        replanner = self._current.of(members)
        if replanner.profile is None:
            return
        job = self._running(state.job)
        profile = replanner.profile_on(job.domains, self._current.known.of(members))
        found = question_for_new_times(job, profile)
        if found is None:
            return
        question, control = found
        try:
            decision, solve_s = await self._solved(question)
        except JobError:
            # At these speeds nothing is saved: what is frozen stays.
            return
        newest = self._view().freeze.newest
        moved = self._above_prefix and self._view().freeze.frozen_layers != self._solved_above
        if self._outdated or newest is None or not (moved or differ(newest.ratios, decision.ratios)):
            return
        self._version += 1
        plan = decision.freeze_plan(job.plan, epoch=self._order.epoch, version=self._version, control=control)
        await self._loop.post_and_wait(Solved(solution_of(decision, plan, solve_s)))

    @property
    def _above_prefix(self) -> bool:
        """Whether a freeze program works above a prefix."""
        return works_above_prefix(self._view().freeze.method)

    def budget(self) -> float | None:
        """r_max of the program that `solve_again` has solved; None: there is none."""
        found = self._budget_in_force()
        return None if found == AUTO else found

    def _budget_in_force(self) -> Budget | None:
        replayed = self._order.freezing.replayed
        return budget_in_force(self._setup.config.freeze, self._view(), replayed=replayed)

    def again(self, entry: CommandEntry) -> bool:
        """Whether a command of the previous controller needs no answer yet: the plan that it asked for, or one that
        took its place, goes out to the ranks again."""
        proposed = self._view().freeze.proposed
        return proposed is not None and entry.freeze is not None and entry.freeze <= proposed.key

    def _training(self) -> JobData:
        state = self._loop.state
        if not isinstance(state, Training):
            raise JobError(f"the job is {in_words(state)}: freezing changes while it trains; ask again then")
        return state.job

    def _running(self, job: JobData) -> Running:
        members = job.membership.members
        return Running(
            spec=self._setup.config.freeze,
            adaptive=self._setup.config.optimizer.adaptive,
            view=copied(self._view()),
            plan=job.progress.plan,
            schedule=job.progress.schedule,
            coming=expected(job)[0],
            profile=self._setup.profile,
            replanner=self._current.of(members),
            slowdowns=tuple(self._current.known.of(members)),
            domains=tuple(domains_of(job)),
            replayed=self._order.freezing.replayed,
        )

    async def _solved(
        self, question: FreezeQuestion, observations: Sequence[Observation] = ()
    ) -> tuple[FreezeDecision, float]:
        """Solve the freeze program in a thread; return also how many seconds it took.

        Raises:
            JobError: it has no solution.
        """
        begun_s = time.perf_counter()
        try:
            decision = await asyncio.to_thread(decide, question, observations)
        except ValueError as error:
            raise JobError(f"{error}; the job trains on as it is") from error
        return decision, time.perf_counter() - begun_s

    def _drop_link(self) -> None:
        if self._planning is not None:
            self._planning.cancel()
        self._link = self._planning = None


def differ(ratios: Ratios, others: Ratios) -> bool:
    """Whether some ratio is materially another one."""
    return any(
        abs(one - other) > MATERIAL
        for row, of_other in zip(ratios, others, strict=True)
        for one, other in zip(row, of_other, strict=True)
    )
