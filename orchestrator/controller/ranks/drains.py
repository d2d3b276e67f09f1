"""Finds the ranks whose nodes Ray drains, and their deadlines. Does not decide where their layers go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from orchestrator.cluster.draining import Table, draining
from orchestrator.events.types import Warned
from orchestrator.lifecycle.stimuli import Going, Noted
from workers.actor import Home

EVERY_S = 0.5
"""Between two queries of Ray's table."""
Homes = Mapping[int, Home]
"""Rank number -> where it runs, for every rank that is not gone."""


def drained(table: Table, homes: Homes, now_s: float) -> tuple[Going, ...]:
    """Return one stimulus for each draining node with ranks, the most urgent first.

    Args:
        now_s: seconds since the Unix epoch.
    """
    going: list[Going] = []
    for node, deadline_ms in table.items():
        if ranks := frozenset(rank for rank, home in homes.items() if home.node == node):
            left_s = max(0.0, deadline_ms / 1000 - now_s) if deadline_ms else None
            host = homes[min(ranks)].host
            going.append(Going(ranks, "ray", left_s, node, host))
    return tuple(sorted(going, key=_urgency))


class Fresh:
    """Tells which drains are new: a node counts again if its deadline changes or another rank runs there."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[int, frozenset[int]]] = {}
        """Node -> its deadline in ms and its ranks, as last returned."""

    def collect(self, table: Table, homes: Homes, now_s: float) -> tuple[Going, ...]:
        """Return those of `drained` that are new; forget cancelled drains."""
        self._told = {node: told for node, told in self._told.items() if node in table}
        fresh: list[Going] = []
        for going in drained(table, homes, now_s):
            deadline_ms, ranks = self._told.get(going.node, (None, frozenset[int]()))
            if deadline_ms != table[going.node] or not ranks >= going.ranks:
                fresh.append(going)
                self._told[going.node] = table[going.node], going.ranks
        return tuple(fresh)


async def watch_drains(
    homes: Callable[[], Homes],
    post: Callable[[Going | Noted], None],
    *,
    table: Callable[[], Table] | None = None,
    every_s: float = EVERY_S,
) -> None:
    """Post each drain of a node with ranks, once; ends when it is cancelled.

    Args:
        homes: called before each query.
        post: takes the stimuli, and one warning if Ray does not answer.
        table: returns the draining nodes; may block. None: Ray's own.
        every_s: between two queries.
    """
    fresh, said = Fresh(), False
    look = table or draining
    while True:
        try:
            seen = await asyncio.to_thread(look)
        # Ray's errors here have no common base class.
        except Exception as error:
            if not said:
                post(Noted(Warned(text=f"Ray does not say which nodes it drains: {error}")))
            said = True
        else:
            for going in fresh.collect(seen, homes(), time.time()):
                post(going)
        await asyncio.sleep(every_s)


def _urgency(going: Going) -> float:
    return float("inf") if going.left_s is None else going.left_s
