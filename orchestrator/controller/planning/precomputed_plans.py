"""Plans for other sets of ranks, made on request and ahead of failures, and whether a regroup pays.

The runtime's side of the `Replanner`, which knows no event loop: its work runs in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from statistics import median

from orchestrator.controller.planning.current_replanner import CurrentReplanner
from orchestrator.events.types import Event, Regrouped
from orchestrator.lifecycle.effects import MakePlan, PlanAhead, Weigh
from orchestrator.lifecycle.stimuli import PlannedAhead, PlanReady, Unplannable, Weighed
from planner.arrivals import built_ahead, copied_ahead
from planner.failure_domains import zone_of
from planner.ir import Schedule
from planner.plan import Plan, PlanError
from planner.search.gain import pays
from planner.simulation.resized_cluster import Sites
from workers.protocol.reports import PrefixFrozen, StepReport

FIRST_REGROUP_S = 2.0
"""Expected time of a regroup until one has been seen."""
SEEN_STEPS = 20
"""Number of newest steps that give the median step time."""


class PrecomputedPlans:
    """The plans of one job.

    Args:
        on_host: whether ranks keep copies in host memory.
    """

    def __init__(self, planning: CurrentReplanner, *, on_host: bool = False) -> None:
        self._planning = planning
        self._on_host = on_host
        self._steps_s: list[float] = []
        """Times of the newest steps of this generation."""
        self._regroup_s = FIRST_REGROUP_S
        self._made = 0
        """Plans for the ranks that continue after a change: with each, plans ahead for those before end."""

    def fold(self, event: Event) -> None:
        """Learn the times of steps and regroups from a logged event."""
        match event:
            case StepReport(step_s=step_s):
                self._steps_s = [*self._steps_s[1 - SEEN_STEPS :], step_s]
            case PrefixFrozen():
                # Steps take another time from now on.
                self._steps_s = []
            case Regrouped():
                self._steps_s = []
                parts = (event.detect_s, event.settle_s, event.plan_s, event.move_s, event.resume_s)
                # The next regroup need not wait until a hang is found.
                self._regroup_s = sum(parts) - event.silent_s
            case _:
                pass

    async def make(
        self, effect: MakePlan, frozen: int = 0, replicas: int | None = None
    ) -> PlanReady | Unplannable:
        """Return the plan for the ranks that continue.

        Args:
            frozen: layers that are frozen as a whole in the step that they go on with, perhaps fewer than by now.
            replicas: of that step, perhaps fewer too; None: as many as by now.
        """
        self._made += 1
        recovery_plan = effect.recovery_plan
        replanner = self._planning.of(recovery_plan.lineup)
        if frozen < replanner.frozen:
            replanner = replace(replanner, frozen=frozen, released=min(frozen, replanner.released))
        if replicas is not None:
            replanner = replanner.with_replicas(replicas)
        domains = [effect.domains[rank] for rank in recovery_plan.lineup]
        slowdowns = self._planning.known.of(recovery_plan.lineup)
        try:
            if effect.first is not None:
                plan = await asyncio.to_thread(replanner.with_standbys, effect.first, domains)
                schedule = replanner.schedule
            else:
                plan, schedule = await asyncio.to_thread(
                    replanner.plan_for,
                    len(domains),
                    epoch=effect.epoch,
                    version=effect.version,
                    reason=recovery_plan.reason,
                    domains=domains,
                    slowdowns=slowdowns,
                )
        except PlanError as error:
            return Unplannable(str(error), effect.round)
        return PlanReady(plan, schedule, effect.round)

    async def look_ahead(
        self, domains: Mapping[int, str], now: Callable[[], Mapping[int, str]] | None = None
    ) -> None:
        """Make plans for the failure of any one rank, of any one node and of any one zone before it happens. Ends early
        if another replanner or other speeds take the place of those that it began with, or if other ranks train.

        Args:
            domains: rank -> its failure domain, in the order of places.
            now: those of the ranks that train by then; None: they stay.
        """
        planning = self._planning
        before = self._made
        replanner, known = planning.replanner, planning.known
        made: set[tuple[int, Sites]] = set()
        for others in _left(domains):
            if replanner is not planning.replanner or known != planning.known:
                return
            if before != self._made or (now is not None and now() != domains):
                return
            ranks, named = [*others], [*others.values()]
            of_ranks, slowdowns = planning.of(ranks), known.of(ranks)
            alike = id(of_ranks), Sites.of(named, slowdowns)
            if alike in made:
                await asyncio.sleep(0)
                continue
            made.add(alike)
            with suppress(PlanError):
                await asyncio.to_thread(
                    of_ranks.plan_for,
                    len(ranks),
                    epoch=0,
                    version=0,
                    reason="",
                    domains=named,
                    slowdowns=slowdowns,
                )

    async def plan_ahead(self, effect: PlanAhead) -> PlannedAhead:
        """Return the plan of a coming generation, and the copies that it needs."""
        lineup, of = effect.lineup, effect.domains
        plan: Plan | None = None
        schedule: Schedule | None = None
        try:
            plan, schedule = await asyncio.to_thread(
                self._planning.of(lineup).plan_for,
                len(lineup),
                epoch=0,
                version=0,
                reason=effect.reason,
                domains=[of[rank] for rank in lineup],
                slowdowns=self._planning.known.of(lineup),
            )
            copying = copied_ahead(effect.now, effect.members, plan, lineup)
            homes = [of[rank] for rank in effect.members]
            check = partial(self._planning.of(effect.members).check_memory, copying, homes)
            await asyncio.to_thread(check)
        except PlanError as error:
            return PlannedAhead(effect.number, plan, schedule, why=str(error))
        building = built_ahead(effect.now, effect.members, plan, lineup, on_host=self._on_host)
        try:
            places = [building.get(rank, ()) for rank in effect.members[: copying.world_size]]
            await asyncio.to_thread(check, ahead=places)
        except PlanError as error:
            return PlannedAhead(effect.number, plan, schedule, copying, why=str(error))
        return PlannedAhead(effect.number, plan, schedule, copying, building)

    async def weigh(self, effect: Weigh, last_step: int) -> Weighed:
        """Decide whether more ranks, or the layers frozen by now, are worth a regroup.

        Args:
            last_step: of the job.
        """
        try:
            compared = await asyncio.to_thread(
                self._planning.of(effect.ranks).compared,
                effect.now,
                len(effect.domains),
                domains=effect.domains,
                slowdowns=self._planning.known.of(effect.ranks),
            )
        except PlanError as error:
            return Weighed(False, str(error), effect.round, effect.prefix)
        measured_s = median(self._steps_s) if self._steps_s else None
        worth_it, why = pays(compared, last_step - effect.step, self._regroup_s, step_s=measured_s)
        return Weighed(worth_it, why, effect.round, effect.prefix)


def _left(domains: Mapping[int, str]) -> Iterator[dict[int, str]]:
    """Yield the ranks that are left, and their domains, after each failure that is planned for; never none."""
    for lost in domains:
        if len(domains) > 1:
            yield {rank: domain for rank, domain in domains.items() if rank != lost}
    for domain_of in (str, zone_of):
        for lost in dict.fromkeys(map(domain_of, domains.values())):
            if lost and (left := {r: d for r, d in domains.items() if domain_of(d) != lost}):
                yield left
