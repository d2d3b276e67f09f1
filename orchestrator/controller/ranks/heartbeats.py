"""Heartbeats: whether each rank that is up answers and makes progress. What counts as hung is in `hangs.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from orchestrator.cluster.hosts import RankGone
from orchestrator.controller.ranks.calls import RankCalls
from orchestrator.controller.ranks.hangs import StepPace, Verdict, judge
from orchestrator.controller.ranks.living import LivingRanks
from orchestrator.controller.ranks.patience import Overdue, Patience
from orchestrator.controller.ranks.silence import Silence
from orchestrator.events.types import Event, Stalled, Warned
from orchestrator.lifecycle.stimuli import Noted, Stimulus
from orchestrator.quantities import seconds
from workers.control.rank_error import RankError
from workers.protocol.reports import Working

PING_EVERY_S = 1.0
"""Between two heartbeats of a rank, at most."""
STALL_S = 3.0
"""A rank that stood still for so long, or for its whole limit, leaves a mark in the log."""


class Heartbeats:
    """The heartbeats of one job's ranks.

    Args:
        timeout_s: what a generation's first step may take.
        post: takes warnings and standstills.
    """

    def __init__(
        self,
        calls: RankCalls,
        living: LivingRanks,
        patience: Patience,
        *,
        hang_timeout_s: float,
        timeout_s: float,
        post: Callable[[Stimulus], None],
    ) -> None:
        self._calls = calls
        self._living = living
        self._patience = patience
        self._hang_timeout_s = hang_timeout_s
        self._timeout_s = timeout_s
        self._post = post
        self._pace = StepPace()

    def fold(self, event: Event) -> None:
        """Learn the times of steps from a logged event."""
        self._pace = self._pace.after(event)

    async def listen(self, rank: int) -> None:
        """Send heartbeats to one rank until it is gone: check that it answers and makes progress."""
        limit_s, every_s = self._hang_timeout_s, ping_every_s(self._hang_timeout_s)
        slow: Working | None = None
        while rank in self._living.homes:
            try:
                working, silence = await self._patience.answer(
                    rank,
                    self._calls.reached(rank, "ping"),
                    limit_s=limit_s,
                    every_s=every_s,
                    what="answered nothing for",
                    setting="elastic.hang_timeout_s",
                    silence=self._patience.silence_of(rank),
                )
            except Overdue as overdue:
                await self._living.bury(rank, str(overdue), silent_s=overdue.silence.silent_s)
            except RankGone as error:
                await self._living.found_dead(rank, str(error))
            except RankError:
                pass
            else:
                self._mark_silence(rank, silence)
                slow = await self._judge(rank, working, slow)
            await asyncio.sleep(every_s)

    def _mark_silence(self, rank: int, silence: Silence) -> None:
        """Log that a rank which stood still goes on. While the controller stood still, the rank may have trained."""
        if silence.listened_s >= min(STALL_S, self._hang_timeout_s):
            self._post(Noted(Stalled(rank=rank, seconds=silence.listened_s, reason=silence.reasons())))

    async def _judge(self, rank: int, working: Working | None, slow: Working | None) -> Working | None:
        """Kill a rank whose action takes too long, or warn of it once; return what it computes if that is slow.

        Args:
            slow: what it computed at the heartbeat before, if that was slow.
        """
        verdict, why = judge(
            working, self._pace, hang_timeout_s=self._hang_timeout_s, timeout_s=self._timeout_s
        )
        if verdict is Verdict.HUNG:
            assert working is not None
            await self._living.bury_late(rank, why, silent_s=working.for_s)
        elif verdict is Verdict.SLOW:
            if slow is None:
                self._post(Noted(Warned(text=f"rank {rank} {why}")))
            return working
        elif slow is not None:
            starved = f"it waited for a processor for {seconds(slow.starved_s)}" if slow.starved_s else ""
            self._post(Noted(Stalled(rank=rank, seconds=slow.for_s, reason=starved, action=slow.action)))
        return None


def ping_every_s(hang_timeout_s: float) -> float:
    """Return the time between two heartbeats of a rank that may be silent for `hang_timeout_s`."""
    return min(PING_EVERY_S, hang_timeout_s / 4)
