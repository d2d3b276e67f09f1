"""Heartbeats: whether each rank that is up answers and makes progress. What counts as hung is in `hangs.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from orchestrator.cluster.hosts import Gone
from orchestrator.controller.ranks.calls import Calls
from orchestrator.controller.ranks.hangs import Pace, Verdict, judge, within
from orchestrator.controller.ranks.living import LivingRanks
from orchestrator.events.types import Event, Warned
from orchestrator.lifecycle.stimuli import Noted, Stimulus
from workers.control.rank_error import RankError

PING_EVERY_S = 1.0
"""Between two heartbeats of a rank, at most."""


class Heartbeats:
    """Of one job's ranks.

    Args:
        timeout_s: what a generation's first step may take.
        post: takes warnings.
    """

    def __init__(
        self,
        calls: Calls,
        living: LivingRanks,
        *,
        hang_timeout_s: float,
        timeout_s: float,
        post: Callable[[Stimulus], None],
    ) -> None:
        self._calls = calls
        self._living = living
        self._hang_timeout_s = hang_timeout_s
        self._timeout_s = timeout_s
        self._post = post
        self._pace = Pace()

    def take(self, event: Event) -> None:
        """Learn the times of steps from a logged event."""
        self._pace = self._pace.after(event)

    async def listen(self, rank: int) -> None:
        """Send heartbeats to one rank until it is gone: check that it answers and makes progress."""
        limit_s, every_s = self._hang_timeout_s, ping_every_s(self._hang_timeout_s)
        slow = False
        while rank in self._living.homes:
            try:
                # The last answer came up to `every_s` before this call.
                working = await within(self._calls.reached(rank, "ping"), limit_s - every_s, every_s)
            except TimeoutError:
                text = f"answered nothing for {limit_s:g} s (elastic.hang_timeout_s), and was killed"
                await self._living.bury(rank, text)
            except Gone as error:
                await self._living.found_dead(rank, str(error))
            except RankError:
                pass
            else:
                verdict, why = judge(working, self._pace, hang_timeout_s=limit_s, timeout_s=self._timeout_s)
                if verdict is Verdict.HUNG:
                    await self._living.bury_late(rank, why)
                elif verdict is Verdict.SLOW and not slow:
                    self._post(Noted(Warned(text=f"rank {rank} {why}")))
                slow = verdict is Verdict.SLOW
            await asyncio.sleep(every_s)


def ping_every_s(hang_timeout_s: float) -> float:
    """Return the time between two heartbeats of a rank that may be silent for `hang_timeout_s`."""
    return min(PING_EVERY_S, hang_timeout_s / 4)
