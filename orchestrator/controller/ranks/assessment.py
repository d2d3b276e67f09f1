"""Asks every rank where it stands, and has it leave its step: what the lifecycle needs to decide after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from orchestrator.cluster.hosts import RankGone, stands
from orchestrator.controller.event_loop import Work
from orchestrator.controller.ranks.calls import LOOK_EVERY_S, RankCalls, raised
from orchestrator.controller.ranks.living import LivingRanks
from orchestrator.controller.ranks.patience import Overdue, Patience
from orchestrator.lifecycle.stimuli import Positioned, Stimulus
from workers.control.rank_error import RankError
from workers.protocol.reports import RankPosition


@dataclass(eq=False, repr=False)
class Assessment:
    """Asks one job's ranks for their positions."""

    _calls: RankCalls
    _living: LivingRanks
    _patience: Patience
    _timeout_s: float
    """Longest time that a rank may take to leave its step, not counting what its host or the controller takes."""
    _post: Callable[[Stimulus], None]
    """Takes each position."""
    _spawn: Callable[[Work], asyncio.Future[Any]]
    """Runs work in the background; ends it with the job."""

    async def assess(self, ranks: Iterable[int], number: int, generation: int) -> None:
        """Post where each of `ranks` stands, once it has left `generation`; kill those that do not answer.

        Args:
            number: of the round.
        """
        await asyncio.gather(*(self._position(rank, number, generation) for rank in ranks))

    async def _position(self, rank: int, number: int, generation: int) -> None:
        asking = asyncio.ensure_future(self._ask_position(rank, number, generation))
        try:
            home = self._living.homes.get(rank)
            if home is None or not home.port or await stands(home):
                await asking
            elif rank in self._living.homes:
                await self._living.found_dead(rank)
        finally:
            asking.cancel()

    async def _ask_position(self, rank: int, number: int, generation: int) -> None:
        left = self._spawn(self._leave(rank, generation))
        # Heartbeats find a rank that hangs. This one answers, and may be loading, or in a long action.
        training = self._living.training.pop(rank, None)
        # The call queues behind what the rank is doing.
        position = asyncio.ensure_future(self._calls.reached(rank, "position"))
        try:
            told, _ = await self._patience.answer(
                rank,
                self._left_at(rank, training, position, left),
                limit_s=self._timeout_s,
                every_s=min(LOOK_EVERY_S, self._timeout_s / 4),
                what="did not leave its step within",
                setting="cluster.timeout_s",
            )
            self._post(Positioned(told, number))
        except Overdue as overdue:
            await self._living.bury_late(rank, str(overdue))
        except RankGone as error:
            if rank in self._living.homes:
                await self._living.found_dead(rank, str(error))
        except RankError as error:
            await self._living.bury(rank, f"cannot report its position, and was killed: {error}")
        finally:
            position.cancel()

    async def _left_at(
        self,
        rank: int,
        training: asyncio.Future[Any] | None,
        position: asyncio.Future[RankPosition],
        left: asyncio.Future[Any],
    ) -> RankPosition:
        """Return where a rank stands once it has left its generation."""
        if training is not None:
            await self._last_words(rank, training)
        told = await position
        # A `leave` that arrived later would interrupt what follows.
        await asyncio.shield(left)
        return told

    async def _leave(self, rank: int, generation: int) -> None:
        """Have a rank leave `generation`; return once it has, or is dead."""
        with suppress(RankGone, RankError):
            await self._calls.reached(rank, "leave", generation)

    async def _last_words(self, rank: int, training: asyncio.Future[Any]) -> None:
        """Report why a rank's training ended, which may be why the generation did."""
        try:
            await training
        except RankError as error:
            self._post(raised(rank, error, -1))
        except RankGone:
            pass
