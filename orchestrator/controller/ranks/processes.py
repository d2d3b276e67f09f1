"""The processes of ranks start, are taken over from an earlier controller, and end; and whether there is room for more.

Where they run is up to `Hosts`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from orchestrator.cluster.hosts import Hosts, RankGone
from orchestrator.controller.config import ControllerConfig
from orchestrator.controller.event_loop import Work
from orchestrator.controller.ranks.calls import raised
from orchestrator.controller.ranks.heartbeats import Heartbeats, ping_every_s
from orchestrator.controller.ranks.last_output import last_output
from orchestrator.controller.ranks.living import LivingRanks
from orchestrator.controller.ranks.patience import Overdue, Patience
from orchestrator.events.types import Event, Noticed, Scaled, Undrained, Warned
from orchestrator.lifecycle.stimuli import (
    Noted,
    Placed,
    RankLost,
    Ready,
    Reclaimed,
    Room,
    Stimulus,
    Unplaceable,
)
from workers.actor import Home
from workers.control.rank_error import RankError

LOOK_FOR_ROOM_S = 1.0
"""Between two checks whether the cluster has room for more ranks."""


@dataclass(eq=False, repr=False)
class RankProcesses:
    """The rank processes of one job."""

    _setup: ControllerConfig
    _hosts: Hosts
    _living: LivingRanks
    _patience: Patience
    _heartbeats: Heartbeats
    _post: Callable[[Stimulus], None]
    """Takes what happens to them."""
    _spawn: Callable[[Work], asyncio.Future[Any]]
    """Runs work in the background; ends it with the job."""
    _calling: set[int] = field(default_factory=set, init=False)
    """Ranks that are starting."""
    _dismissing: set[int] = field(default_factory=set, init=False)
    """Ranks that are giving their room back."""
    _going: set[int] = field(default_factory=set, init=False)
    """Ranks that are draining, or are gone."""
    _most: int = field(init=False)
    """Number of ranks that the job is to have, spares included."""

    def __post_init__(self) -> None:
        self._most = self._setup.replanner.first.world_size + self._setup.config.elastic.spares

    def fold(self, event: Event) -> None:
        """Learn the draining ranks, the nodes to keep off and the requested size from a logged event."""
        if isinstance(event, Noticed):
            self._going |= set(event.ranks)
            # A signal reaches one process: its node stays.
            if event.source != "sigterm":
                self._hosts.shun(event.node)
        if isinstance(event, Undrained):
            self._hosts.readmit(event.node)
        if isinstance(event, Scaled):
            self._most = event.places + event.spares

    async def watch_room(self) -> None:
        """Post when there is room for ranks that the job lacks, until cancelled.

        While ranks are being dismissed the room still grows: a resumed job that saw a part of it would go on
        with fewer ranks than it had.
        """
        while True:
            await asyncio.sleep(LOOK_FOR_ROOM_S)
            if len(self._living.homes.keys() - self._going) + len(self._calling) < self._most:
                with suppress(Exception):  # a cluster in trouble has no room
                    if not self._dismissing and (room := await self._hosts.room()):
                        self._post(Room(room))

    async def place(self, ranks: Sequence[int]) -> None:
        """Reserve resources for all of `ranks`, and report whether that succeeds."""
        self._calling |= set(ranks)
        lacking = await self._hosts.reserve(ranks, self._setup.config.cluster.wait_s)
        if lacking is None:
            self._post(Placed())
            return
        ways_out = "lower pipeline.ranks or cluster.resources_per_rank, add nodes, or wait longer"
        self._post(Unplaceable(f"{lacking}; {ways_out}"))

    async def prepare(self, ranks: Sequence[int]) -> None:
        """Start ranks where their resources are, and report each that is up or did not start."""
        for rank in ranks:
            self._hosts.start(rank)
        await asyncio.gather(*(self._set_up(rank) for rank in ranks))

    async def _set_up(self, rank: int) -> None:
        try:
            async with asyncio.timeout(self._setup.config.cluster.wait_s):
                home: Home = await self._hosts.call(rank, "setup")
        except TimeoutError:
            self._avoid_node_of(rank)
            await self._hosts.end(rank)
            wait_s = self._setup.config.cluster.wait_s
            self._post(
                RankLost(rank, f"did not start within {wait_s:g} s: raise cluster.wait_s for slow machines")
            )
        except RankGone as error:
            self._avoid_node_of(rank)
            await self._hosts.end(rank)
            if error.stillborn:
                self._post(RankLost(rank, str(error)))
            else:
                words = await last_output(self._setup.config.job.folder, rank)
                died = f"its process died as it started: {words.cause or error}{words.place}"
                self._post(RankLost(rank, died, dead=True, details=words.lines))
        except RankError as error:
            self._avoid_node_of(rank)
            self._post(raised(rank, error, 0))
        else:
            self._hosts.started(rank)
            self._up(rank, home)
            self._post(Ready(rank, home.node, home.host, home.pid, home.zone, home.machine))
        finally:
            self._calling.discard(rank)

    def _avoid_node_of(self, rank: int) -> None:
        if text := self._hosts.failed(rank):
            self._post(Noted(Warned(text=text)))

    def _up(self, rank: int, home: Home) -> None:
        self._living.homes[rank] = home
        self._spawn(self._heartbeats.listen(rank))

    async def recruit(self, ranks: Sequence[int]) -> None:
        """Reserve resources for each of `ranks` and start it; report what becomes of each."""
        await asyncio.gather(*(self._recruit_one(rank) for rank in ranks))

    async def _recruit_one(self, rank: int) -> None:
        self._calling.add(rank)
        try:
            lacking = await self._hosts.reserve([rank], self._setup.config.cluster.wait_s)
        except Exception as error:  # a cluster in trouble has no room; the job trains on
            lacking = f"{type(error).__name__}: {error}"
        if lacking is None:
            await self.prepare([rank])
            return
        self._calling.discard(rank)
        await self._hosts.end(rank)
        self._post(RankLost(rank, f"could not be added: {lacking}", dead=True))

    async def reclaim(self, ranks: Iterable[int], number: int) -> None:
        """Take over ranks that an earlier controller started.

        Args:
            number: of the round.
        """
        await asyncio.gather(*(self._reclaim_one(rank, number) for rank in ranks))

    async def _reclaim_one(self, rank: int, number: int) -> None:
        limit_s = self._setup.config.elastic.hang_timeout_s
        try:
            home, _ = await self._patience.answer(
                rank,
                self._hosts.reclaim(rank),
                limit_s=limit_s,
                every_s=ping_every_s(limit_s),
                what="did not answer the controller that took over within",
                setting="elastic.hang_timeout_s",
            )
        except Overdue as overdue:
            await self._living.bury(rank, str(overdue), silent_s=overdue.silence.silent_s)
        except RankError:
            await self._living.bury(rank, "did not answer the controller that took over, and was killed")
        except RankGone as error:
            await self._living.found_dead(rank, str(error))
        else:
            self._up(rank, home)
            self._post(Reclaimed(rank, home.node, home.host, number))

    async def dismiss(self, ranks: Collection[int]) -> None:
        """End ranks and give their resources back."""
        for rank in ranks:
            self._living.homes.pop(rank, None)
        self._dismissing |= set(ranks)
        try:
            await asyncio.gather(*(self._hosts.end(rank) for rank in ranks))
        finally:
            self._dismissing -= set(ranks)
