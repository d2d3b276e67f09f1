"""Asks every rank where it stands, and has it leave its step: what the lifecycle needs to decide after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from orchestrator.cluster.hosts import Gone, stands
from orchestrator.controller.event_loop import Work
from orchestrator.controller.ranks.calls import Calls, raised
from orchestrator.controller.ranks.living import LivingRanks
from orchestrator.lifecycle.stimuli import Positioned, Stimulus
from workers.control.rank_error import RankError


class Assessment:
    """Of one job's ranks.

    Args:
        patience_s: how long a rank may take to leave its step.
        post: takes each position.
        spawn: runs work in the background; ends it with the job.
    """

    def __init__(
        self,
        calls: Calls,
        living: LivingRanks,
        patience_s: float,
        post: Callable[[Stimulus], None],
        spawn: Callable[[Work], asyncio.Future[Any]],
    ) -> None:
        self._calls = calls
        self._living = living
        self._patience_s = patience_s
        self._post = post
        self._spawn = spawn

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
            async with asyncio.timeout(self._patience_s):
                if training is not None:
                    await self._last_words(rank, training)
                told = await position
                # A `leave` that arrived later would interrupt what follows.
                await asyncio.shield(left)
                self._post(Positioned(told, number))
        except TimeoutError:
            limit = f"{self._patience_s:g} s (cluster.timeout_s)"
            await self._living.bury_late(rank, f"did not leave its step within {limit}, and was killed")
        except Gone as error:
            if rank in self._living.homes:
                await self._living.found_dead(rank, str(error))
        except RankError as error:
            await self._living.bury(rank, f"cannot report its position, and was killed: {error}")
        finally:
            position.cancel()

    async def _leave(self, rank: int, generation: int) -> None:
        """Have a rank leave `generation`; return once it has, or is dead."""
        with suppress(Gone, RankError):
            await self._calls.reached(rank, "leave", generation)

    async def _last_words(self, rank: int, training: asyncio.Future[Any]) -> None:
        """Report why a rank's training ended, which may be why the generation did."""
        try:
            await training
        except RankError as error:
            self._post(raised(rank, error, -1))
        except Gone:
            pass
