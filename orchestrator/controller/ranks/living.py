"""The ranks that are up, and the report of each death: one, with what the process left behind.

Does not look for dead ranks: whoever finds one says so here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from orchestrator.cluster.exits import UNKNOWN
from orchestrator.cluster.hosts import Hosts, RankGone
from orchestrator.controller.event_loop import Work
from orchestrator.controller.ranks.last_output import last_output
from orchestrator.lifecycle.stimuli import RankLost, Stimulus
from workers.actor import Home
from workers.control.rank_error import RankError

STACKS_S = 1.0
"""Time limit for a rank that is about to be killed to return its threads' stacks."""


@dataclass(eq=False, repr=False)
class LivingRanks:
    """The living ranks of one job."""

    _folder: str
    """The job's."""
    _hosts: Hosts
    _post: Callable[[Stimulus], None]
    """Takes each report."""
    _spawn: Callable[[Work], asyncio.Future[Any]]
    """Runs work in the background; ends it with the job."""
    homes: dict[int, Home] = field(default_factory=dict, init=False)
    """Homes of all ranks that are up."""
    training: dict[int, asyncio.Future[Any]] = field(default_factory=dict, init=False)
    """Calls under way that end with a generation."""
    _deaths: dict[int, asyncio.Future[None]] = field(default_factory=dict, init=False)
    """Death reports of ranks whose process was found dead."""

    async def found_dead(self, rank: int, cause: str = UNKNOWN) -> None:
        """Report once that the rank's process is dead: by `cause`, unless its own output says more.

        The caller may be cancelled when the lifecycle abandons an attempt: the death is reported all the
        same.
        """
        if rank not in self._deaths:
            self._deaths[rank] = self._spawn(self._report_death(rank, cause))
        await asyncio.shield(self._deaths[rank])

    async def _report_death(self, rank: int, cause: str) -> None:
        home = self.homes.pop(rank, None)
        where = f" (pid {home.pid} on {home.host})" if home is not None else ""
        words = await last_output(self._folder, rank)
        await self.bury(rank, f"its process{where} died: {words.cause or cause}{words.place}", words.lines)

    async def bury(self, rank: int, why: str, details: str = "", *, silent_s: float = 0.0) -> None:
        """Kill the rank, if it lives, and report it dead: anything it still does is ignored.

        Args:
            details: its threads' stacks, or its last output.
            silent_s: how long it had stood still.
        """
        self.homes.pop(rank, None)
        self._post(RankLost(rank, why, dead=True, details=details, silent_s=silent_s))
        self.training.pop(rank, None)
        await self._hosts.end(rank)

    async def bury_late(self, rank: int, why: str, *, silent_s: float = 0.0) -> None:
        """Kill a rank that took too long, after asking for its threads' stacks.

        Args:
            silent_s: how long it had stood still.
        """
        up, details = rank in self.homes, ""
        with suppress(TimeoutError, RankGone, RankError):
            async with asyncio.timeout(STACKS_S):
                details = await self._hosts.call(rank, "stacks")
        if rank in self.homes or not up:  # else it was found dead meanwhile, and that was reported
            await self.bury(rank, why, details, silent_s=silent_s)
