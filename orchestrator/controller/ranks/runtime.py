"""Carries out the lifecycle's effects on rank processes, by calls with timeouts.

Every answer comes back as a stimulus through `post`. Decides nothing; runs on one event loop, over any
`Hosts`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from orchestrator.cluster.hosts import Hosts
from orchestrator.controller.config import ControllerConfig
from orchestrator.controller.event_loop import Work
from orchestrator.controller.planning.current_replanner import CurrentReplanner
from orchestrator.controller.planning.precomputed_plans import PrecomputedPlans
from orchestrator.controller.ranks.assessment import Assessment
from orchestrator.controller.ranks.calls import RankCalls
from orchestrator.controller.ranks.heartbeats import Heartbeats
from orchestrator.controller.ranks.interrupted_commit import InterruptedCommits
from orchestrator.controller.ranks.living import LivingRanks
from orchestrator.controller.ranks.next_plans import NextPlans
from orchestrator.controller.ranks.patience import Patience
from orchestrator.controller.ranks.processes import RankProcesses
from orchestrator.controller.ranks.training import GenerationTraining
from orchestrator.events.types import Event, Formed, Scaled
from orchestrator.lifecycle.effects import (
    Ask,
    Assess,
    CopyAside,
    Dismiss,
    Effect,
    FinishCommit,
    Follow,
    HostStore,
    Join,
    MakePlan,
    PlanAhead,
    Prepare,
    Propose,
    Reclaim,
    Recruit,
    Reserve,
    Save,
    Switch,
    Train,
    Weigh,
)
from orchestrator.lifecycle.stimuli import Joined, RankLoaded, Stimulus, StoreUp
from planner.course import Course, Leg
from workers.activation_cache.cache_folders import left_behind
from workers.actor import Home
from workers.protocol.reports import ActivationsKept, FreezeStarted, PrefixFrozen

DYING_POLLS, DYING_S = 20, 0.1
"""Number and interval of looks whether ranks that are ended have let go of what they kept in memory."""


class Runtime:
    """The ranks of one job.

    Args:
        post: takes each answer.
        spawn: runs work in the background; ends it with the job.
    """

    def __init__(
        self,
        setup: ControllerConfig,
        hosts: Hosts,
        post: Callable[[Stimulus], None],
        spawn: Callable[[Work], asyncio.Future[Any]],
    ) -> None:
        self._hosts = hosts
        self._post = post
        self._planning = CurrentReplanner(setup.replanner, lambda: self.training.look_ahead_again())
        self._freeze = setup.config.freeze
        """The settings that the newest steps follow."""
        self._chosen = False
        """Whether the job chose them itself, and may choose others."""
        self._prefixes: dict[int, int] = {}
        """First step -> the layers that are frozen as a whole from it on."""
        self._config = setup.config
        self._legs: dict[int, Leg] = {}
        """First step -> the leg of the batch's course that begins with it."""
        self._folder = setup.config.job.folder
        self._keeps, self._keeps_most = False, len(setup.replanner.parameters)
        """Whether ranks keep what these layers make of samples, and of how many layers at most."""
        on_host = setup.config.elastic.copies_on_host(setup.config.device)
        self._precomputed = PrecomputedPlans(self._planning, on_host=on_host)
        self.living = LivingRanks(setup.config.job.folder, hosts, post, spawn)
        patience = Patience(hosts, self.living, setup.config.cluster.timeout_s, post)
        self.calls = RankCalls(hosts, self.living, patience, setup.config.cluster.timeout_s, post)
        self._heartbeats = Heartbeats(
            self.calls,
            self.living,
            patience,
            hang_timeout_s=setup.config.elastic.hang_timeout_s,
            timeout_s=setup.config.cluster.timeout_s,
            post=post,
        )
        self._processes = RankProcesses(setup, hosts, self.living, patience, self._heartbeats, post, spawn)
        self._assessment = Assessment(
            self.calls, self.living, patience, setup.config.cluster.timeout_s, post, spawn
        )
        self._commits = InterruptedCommits(setup, hosts, self.calls, post)
        self.training = GenerationTraining(hosts, self.calls, self.living, self._precomputed, post, spawn)
        self._next_plans = NextPlans(hosts, self.living, post)

    @property
    def homes(self) -> Mapping[int, Home]:
        """Where the ranks that are up run."""
        return self.living.homes

    @property
    def planning(self) -> CurrentReplanner:
        """The replanner that plans for these ranks are made with."""
        return self._planning

    def carry_out(self, effect: Effect) -> Work | None:
        """Return the work that `effect` takes; None: it is done."""
        match effect:
            case Reserve(ranks):
                return self._processes.place(ranks)
            case Prepare(ranks):
                return self._processes.prepare(ranks)
            case Recruit(ranks):
                return self._processes.recruit(ranks)
            case Reclaim(ranks, number):
                return self._processes.reclaim(ranks, number)
            case Dismiss(ranks):
                return self._processes.dismiss(ranks)
            case Assess(ranks, number, generation):
                return self._assessment.assess(ranks, number, generation)
            case FinishCommit():
                return self._commits.finish(effect)
            case Save():
                return self._commits.save(effect)
            case Follow(assignments, number):
                return self.calls.each(
                    {rank: ("follow", assignment) for rank, assignment in assignments.items()},
                    lambda rank, damage: RankLoaded(rank, damage, number),
                    "load its layers",
                    number,
                )
            case HostStore(rank, number):
                return self.calls.each(
                    {rank: ("host_store",)},
                    lambda _, address: StoreUp(address[0], address[1], number),
                    "open its store",
                    number,
                )
            case Join(generation, number):
                return self.calls.each(
                    dict.fromkeys(generation.members, ("join", generation)),
                    lambda rank, _: Joined(rank, number),
                    "join the process group",
                    number,
                )
            case Train():
                return self.training.train(effect)
            case Ask(request, rank):
                return self.calls.unawaited(rank, "request", request)
            case Propose(plan, ranks):
                return self._next_plans.propose(plan, ranks)
            case Switch():
                return self._next_plans.switch(effect)
            case CopyAside():
                return self._next_plans.copy_aside(effect)
            case MakePlan():
                return self._make(effect)
            case PlanAhead():
                return self._tell_of(partial(self._precomputed.plan_ahead, effect))
            case Weigh():
                last_step = self._course.last_step(self._config.job.steps)
                return self._tell_of(partial(self._precomputed.weigh, effect, last_step))
            case _:
                raise AssertionError(f"{effect} is not the runtime's")

    def _make(self, effect: MakePlan) -> Work:
        """Make the plan, for the frozen layers and the replicas of the first step that follows it."""
        step, carried = effect.recovery_plan.step + 1, effect.recovery_plan.carried
        frozen, replicas = self._frozen_in(step), self._course.at(step).replicas
        if carried is not None:  # what the ranks know may not have been told yet
            frozen = min(frozen, carried.prefix.layers)
        return self._tell_of(partial(self._precomputed.make, effect, frozen, replicas))

    def fold(self, event: Event) -> None:
        """Learn the times of steps and regroups, the draining ranks, the requested size and the frozen layers from a
        logged event."""
        match event:
            case PrefixFrozen(layers=layers, step=step, leg=leg):
                self._prefixes[step] = layers
                if leg is not None:
                    self._legs[step] = leg
                    self._planning.set_pipelines(replicas=leg.replicas)
                self._plan_for(layers)
            case ActivationsKept(held_out=False, layers=layers, why_not=why_not):
                self._keeps = self._keeps or not why_not
                most = self._keeps_most
                self._keeps_most = min(most, layers - 1) if why_not else max(most, layers)
                self._plan_for(self._planning.replanner.frozen)
            case Formed(step=step):
                self._legs = {first: leg for first, leg in self._legs.items() if first <= step + 1}
                self._planning.set_pipelines(replicas=self._course.at(step + 1).replicas)
                self._plan_for(self._frozen_in(step + 1))
                self._prefixes = {first: of for first, of in self._prefixes.items() if first <= step + 1}
            case FreezeStarted(plan=plan) if plan.control is not None:
                self._freeze = self._freeze.model_copy(update=plan.settings)
                self._chosen = plan.control.chosen
                self._plan_for(self._planning.replanner.frozen)
            case Scaled(pipelines=pipelines):
                self._planning.set_pipelines(pipelines=pipelines)
            case _:
                pass
        self._precomputed.fold(event)
        self._heartbeats.fold(event)
        self._processes.fold(event)

    @property
    def _course(self) -> Course:
        """The course of the job's batch, as far as it is known."""
        return self._config.course(tuple(leg for _, leg in sorted(self._legs.items())))

    def _frozen_in(self, step: int) -> int:
        """Layers that are frozen as a whole in `step`, as far as it is known."""
        known = [first for first in self._prefixes if first <= step]
        return self._prefixes[max(known)] if known else self._planning.replanner.first_frozen

    def _plan_for(self, frozen: int) -> None:
        """Have plans count on so many frozen layers, where the layout follows them."""
        if self._freeze.pack == "off":
            return
        lasts = self._freeze.lasts and not self._chosen and self._prefixes
        kept = min(frozen, self._keeps_most) if self._keeps else 0
        self._planning.set_freezing(frozen=(frozen, frozen if lasts else 0, kept))

    async def watch_room(self) -> None:
        """Post when there is room for ranks that the job lacks, until cancelled."""
        await self._processes.watch_room()

    async def release(self) -> None:
        """End all ranks and give their resources back; safe at any point, and more than once."""
        self.living.homes.clear()
        self.living.training.clear()
        await self._hosts.release()
        for _ in range(DYING_POLLS):
            if not left_behind(self._folder):
                return
            await asyncio.sleep(DYING_S)

    async def _tell_of(self, ask: Callable[[], Awaitable[Stimulus]]) -> None:
        # It asks itself: a job that ends may cancel it before its first turn, and nobody else would await the answer.
        self._post(await ask())
