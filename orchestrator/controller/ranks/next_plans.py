"""Tells ranks, while they train, what they are to follow next: a freeze plan, another plan, layers to copy ahead.

A rank refuses what it cannot follow, and trains on as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.cluster.hosts import Hosts
from orchestrator.controller.ranks.living import LivingRanks
from orchestrator.events.types import Warned
from orchestrator.lifecycle.effects import CopyAside, Switch
from orchestrator.lifecycle.stimuli import Noted, Reported, Stimulus
from planner.freezing import FreezePlan
from planner.rank_program import place_programs
from planner.schedule.expand import pipeline_schedules
from workers.control.rank_error import RankError
from workers.protocol.orders import CopyAhead, StateSource
from workers.protocol.reports import CopiedAhead


@dataclass(eq=False, repr=False)
class NextPlans:
    """Sends next plans to one job's ranks."""

    _hosts: Hosts
    _living: LivingRanks
    _post: Callable[[Stimulus], None]
    """Takes what ranks refuse."""

    async def propose(self, plan: FreezePlan, ranks: Sequence[int]) -> None:
        """Have every rank prepare `plan`; they adopt it at the first commit at which all have it."""
        calls = {rank: self._hosts.call(rank, "prepare", plan) for rank in ranks}
        for rank, error in (await _refusals(calls)).items():
            self._post(Noted(Warned(text=f"rank {rank} refuses the freeze plan: {error}")))

    async def switch(self, effect: Switch) -> None:
        """Have every rank prepare another plan."""
        programs = place_programs(effect.plan, pipeline_schedules(effect.plan, effect.schedule))
        calls = {
            rank: self._hosts.call(
                rank,
                "prepare_plan",
                effect.plan,
                programs[place],
                effect.generation,
                effect.held,
                effect.building.get(rank, ()),
            )
            for place, rank in enumerate(effect.ranks)
        }
        for rank, error in (await _refusals(calls)).items():
            self._post(Noted(Warned(text=f"rank {rank} refuses the plan: {error}")))

    async def copy_aside(self, effect: CopyAside) -> None:
        """Have ranks without a place copy layers, or let go of them; report those that cannot begin."""
        orders = {rank: self._copy_order(effect, rank) for rank in effect.pieces}
        calls = {rank: self._hosts.call(rank, "copy_ahead", order) for rank, order in orders.items()}
        for rank, error in (await _refusals(calls)).items():
            if not effect.pieces[rank]:
                self._post(
                    Noted(Warned(text=f"rank {rank} keeps what it copied for a change of ranks: {error}"))
                )
                continue
            failed = CopiedAhead(
                rank=rank,
                epoch=orders[rank].epoch,
                change=orders[rank].change,
                step=0,
                layers=tuple(dict.fromkeys(piece.layer for piece in effect.pieces[rank])),
                bytes=0,
                seconds=0.0,
                error=str(error),
            )
            self._post(Reported(failed))

    def _copy_order(self, effect: CopyAside, rank: int) -> CopyAhead:
        living, owners = self._living.homes, effect.pieces[rank]
        homes = {owner: living[owner] for owner in owners.values() if owner in living}
        return CopyAhead(
            epoch=effect.epoch,
            change=effect.change,
            generation=effect.generation,
            sources=tuple(
                StateSource(
                    layer=piece.layer,
                    shard=piece.shard,
                    rank=owner,
                    host=homes[owner].host,
                    port=homes[owner].port,
                )
                for piece, owner in owners.items()
                if owner in homes
            ),
            building=effect.building.get(rank, ()),
            freeze=effect.freeze,
            patience_s=effect.patience_s,
        )


async def _refusals(calls: Mapping[int, Awaitable[Any]]) -> dict[int, RankError]:
    """Await the calls, and return the error of each rank that refuses.

    A rank that died is reported by its training call, or by its heartbeats.
    """
    answers = await asyncio.gather(*calls.values(), return_exceptions=True)
    return {rank: error for rank, error in zip(calls, answers, strict=True) if isinstance(error, RankError)}
