"""Calls to ranks: until one can be reached, or with a time limit and a report of a rank that does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from orchestrator.cluster.hosts import Hosts, RankGone
from orchestrator.controller.ranks.living import LivingRanks
from orchestrator.controller.ranks.patience import Overdue, Patience
from orchestrator.lifecycle.stimuli import RankLost, Stimulus
from workers.control.rank_error import RankError

UNREACHABLE_S = 0.1
"""Before a rank that could not be reached is called again."""
LOOK_EVERY_S = 1.0
"""Between two looks at how a call goes, at most."""


@dataclass(eq=False, repr=False)
class RankCalls:
    """To the ranks of one job."""

    _hosts: Hosts
    _living: LivingRanks
    _patience: Patience
    _timeout_s: float
    """Longest time that a rank may take to answer, not counting what its host or the controller takes."""
    _post: Callable[[Stimulus], None]
    """Takes each answer."""

    async def reached(self, rank: int, method: str, *arguments: Any) -> Any:
        """Make an idempotent call, again until the rank can be reached; return its result."""
        while True:
            try:
                return await self._hosts.call(rank, method, *arguments)
            except RankGone as error:
                if not error.unreachable:
                    raise
            await asyncio.sleep(UNREACHABLE_S)

    async def unawaited(self, rank: int, method: str, *arguments: Any) -> None:
        """Make a call and ignore errors: other calls report a rank that failed."""
        with suppress(RankGone, RankError):
            await self._hosts.call(rank, method, *arguments)

    async def each(
        self,
        calls: Mapping[int, tuple[Any, ...]],
        told: Callable[[int, Any], Stimulus],
        what: str,
        number: int,
    ) -> None:
        """Make one call to each rank and post the results.

        Args:
            told: what a rank and its answer say to the lifecycle.
            what: what they are to do, in words.
            number: of the round.
        """
        answers = {rank: self._hosts.call(rank, *call) for rank, call in calls.items()}
        await asyncio.gather(
            *(self._hear(rank, answer, told, what, number) for rank, answer in answers.items())
        )

    async def _hear(
        self,
        rank: int,
        answer: Awaitable[Any],
        told: Callable[[int, Any], Stimulus],
        what: str,
        number: int,
    ) -> None:
        if (got := await self.answer(rank, answer, what, number)) is not None:
            self._post(told(rank, got[0]))

    async def answer(self, rank: int, answer: Awaitable[Any], what: str, number: int) -> tuple[Any] | None:
        """Return what a rank answers. None: it was lost, and that is posted.

        Args:
            what: what it was to do, in words.
            number: of the round.
        """
        try:
            given, _ = await self._patience.answer(
                rank,
                answer,
                limit_s=self._timeout_s,
                every_s=min(LOOK_EVERY_S, self._timeout_s / 4),
                what=f"did not {what} within",
                setting="cluster.timeout_s",
            )
            return (given,)
        except Overdue as overdue:
            await self._living.bury_late(rank, str(overdue))
        except RankGone as error:
            await self._living.found_dead(rank, str(error))
        except RankError as error:
            self._post(raised(rank, error, number))
        return None


def raised(rank: int, error: RankError, number: int) -> RankLost:
    """Return what `error` of `rank` says to the lifecycle in the round `number`."""
    return RankLost(
        rank,
        error.message,
        error.cut_off,
        error.user_error,
        error.details,
        round=number,
        shortage=error.shortage,
    )
