"""A generation trains: how each rank's training ends. Meanwhile plans are made for the failures that may come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from orchestrator.cluster.hosts import Hosts, RankGone
from orchestrator.controller.event_loop import Work
from orchestrator.controller.planning.precomputed_plans import PrecomputedPlans
from orchestrator.controller.ranks.calls import RankCalls, raised
from orchestrator.controller.ranks.living import LivingRanks
from orchestrator.lifecycle.effects import Train
from orchestrator.lifecycle.stimuli import Departed, RankLost, Stimulus, TrainingEnded
from planner.failure_domains import domain_name
from workers.control.rank_error import RankError
from workers.protocol.reports import Outcome, Parted


@dataclass(eq=False, repr=False)
class GenerationTraining:
    """Trains one job's generations."""

    _hosts: Hosts
    _calls: RankCalls
    _living: LivingRanks
    _precomputed: PrecomputedPlans
    _post: Callable[[Stimulus], None]
    """Takes each end."""
    _spawn: Callable[[Work], asyncio.Future[Any]]
    """Runs work in the background; ends it with the job."""

    async def train(self, effect: Train) -> None:
        """Have ranks train, or go on, and post how each of them ends."""
        method = "outcome" if effect.under_way else "train"
        self._living.training = {
            rank: asyncio.ensure_future(self._hosts.call(rank, method)) for rank in effect.ranks
        }
        hearing = [self._await_end(rank, end, effect.round) for rank, end in self._living.training.items()]
        await asyncio.gather(*hearing, self._precomputed.look_ahead(self.domains(), self.domains))

    def look_ahead_again(self) -> None:
        """Make plans ahead again: another replanner, or other speeds, are in force."""
        if domains := self.domains():
            self._spawn(self._precomputed.look_ahead(domains, self.domains))

    def domains(self) -> dict[int, str]:
        """Return the ranks that train, and the failure domain of each."""
        living = self._living
        homes = {rank: living.homes[rank] for rank in living.training if rank in living.homes}
        return {rank: domain_name(home.node, home.zone) for rank, home in homes.items()}

    async def _await_end(self, rank: int, training: asyncio.Future[Any], number: int) -> None:
        """Post how the training of one rank ends."""
        try:
            end = await asyncio.shield(training)
        except RankGone as error:
            if not error.unreachable:
                await self._living.found_dead(rank, str(error))
            elif self._living.training.get(rank) is training:
                # Its heartbeats show whether it lives; if so, it trains on.
                again = asyncio.ensure_future(self._calls.reached(rank, "outcome"))
                self._living.training[rank] = again
                await self._await_end(rank, again, number)
        except RankError as error:
            self._living.training.pop(rank, None)
            self._post(raised(rank, error, number))
        else:
            match end:
                case Outcome():
                    self._post(TrainingEnded(end, number))
                case Parted():
                    self._post(Departed(end, number))
                case _:
                    self._post(RankLost(rank, "is in no generation", cut_off=True, round=number))
