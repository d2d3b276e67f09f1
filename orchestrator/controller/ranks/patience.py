"""Waiting for a rank's answer, for as long as nothing but the rank itself explains that it is late.

Looks at the rank's process through whoever runs on its host; what that means is in `silence.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from orchestrator.cluster.hosts import Hosts
from orchestrator.controller.ranks.hangs import TIMES_LIMIT, Verdict
from orchestrator.controller.ranks.living import LivingRanks
from orchestrator.controller.ranks.silence import Silence, SilenceObservation, judge_silence
from orchestrator.events.types import Warned
from orchestrator.lifecycle.stimuli import Noted, Stimulus
from workers.actor import Home
from workers.process.process_times import ProcessTimes

LOOK_AT = 0.25
"""The share of its limit after which the controller looks why a rank is silent."""

Answer = TypeVar("Answer")


class Overdue(Exception):
    """A rank's answer did not come in time; the message says how long that was and what explains a part of it.

    Args:
        silence: how it went.
    """

    def __init__(self, text: str, silence: Silence) -> None:
        super().__init__(text)
        self.silence = silence


@dataclass(eq=False, repr=False)
class Patience:
    """With the ranks of one job."""

    _hosts: Hosts
    _living: LivingRanks
    _timeout_s: float
    """`cluster.timeout_s`: no explained silence ends a rank sooner."""
    _post: Callable[[Stimulus], None]
    """Takes warnings."""
    _clock: Callable[[], float] = time.monotonic
    """Monotonic seconds."""
    _heard_s: dict[int, float] = field(default_factory=dict, init=False)
    """Rank -> when it answered last."""

    def silence_of(self, rank: int) -> Silence:
        """Return the silence that begins with the rank's last answer, or now if there was none."""
        heard_s = self._heard_s.setdefault(rank, self._clock())
        return Silence(since_s=heard_s, at_s=heard_s)

    async def answer(
        self,
        rank: int,
        answer: Awaitable[Answer],
        *,
        limit_s: float,
        every_s: float,
        what: str,
        setting: str,
        silence: Silence | None = None,
    ) -> tuple[Answer, Silence]:
        """Return the result of `answer`, and the silence before it.

        Args:
            limit_s: how long it may take with nothing that explains it.
            every_s: between two looks at the clock.
            what, setting: see `judge_silence`.
            silence: how long the rank has been silent before; None: it begins now, and working is no silence.

        Raises:
            Overdue: it took too long.
        """
        works = silence is None
        now_s = self._clock()
        silence = Silence(since_s=now_s, at_s=now_s) if silence is None else silence
        silence = silence.after(SilenceObservation(at_s=now_s), every_s)
        most_s = max(TIMES_LIMIT * limit_s, self._timeout_s)
        future, looking, told = asyncio.ensure_future(answer), None, False
        looking_since_s = now_s
        try:
            while not (await asyncio.wait({future}, timeout=every_s))[0]:
                now_s, seen = self._clock(), None
                if looking is not None and looking.done():
                    seen, looking = looking.result(), None
                dark = looking is not None and self._dark(rank, looking_since_s, now_s, limit_s)
                silence = silence.after(SilenceObservation(at_s=now_s, process=seen, dark=dark), every_s)
                if looking is None and silence.listened_s >= LOOK_AT * limit_s:
                    looking, looking_since_s = self._look(rank), now_s
                verdict, why = judge_silence(
                    silence, limit_s=limit_s, most_s=most_s, works=works, what=what, setting=setting
                )
                if verdict is Verdict.HUNG:
                    raise Overdue(why, silence)
                if verdict is Verdict.SLOW and not told:
                    self._post(Noted(Warned(text=f"rank {rank} {why}")))
                    told = True
            now_s = self._clock()
            silence = silence.after(SilenceObservation(at_s=now_s), every_s)
            self._heard_s[rank] = now_s
            return future.result(), silence
        finally:
            future.cancel()
            if looking is not None:
                looking.cancel()

    def _look(self, rank: int) -> asyncio.Future[ProcessTimes | None] | None:
        home = self._living.homes.get(rank)
        return None if home is None else asyncio.ensure_future(self._seen(home))

    async def _seen(self, home: Home) -> ProcessTimes | None:
        return await self._hosts.look(home)

    def _dark(self, rank: int, since_s: float, now_s: float, limit_s: float) -> bool:
        """Whether nothing on the rank's host has answered since the controller began to look, for a while now."""
        home = self._living.homes.get(rank)
        if home is None or now_s - since_s < LOOK_AT * limit_s:
            return False
        beside = (each for each, other in self._living.homes.items() if other.node == home.node)
        return all(self._heard_s.get(each, since_s) <= since_s for each in beside)
