"""Made-up ranks: they do as a controller tells them at once and only answer, each call and answer as bytes."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from orchestrator.cluster.hosts import RankGone
from planner.codec import to_json
from planner.plan import Plan
from workers.actor import Home
from workers.commit.commit import CommitRecord
from workers.control.rank_error import RankError
from workers.control.records_digest import vector_sha256
from workers.protocol.orders import Assignment
from workers.protocol.reports import RankPosition

RANKS_PER_NODE = 8
DIED = "killed"
HEARTBEAT = "ping"
"""Comes all the time: its bytes are no part of what a loss costs."""


class _Rank:
    """What one rank remembers between calls."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.assignment: Assignment | None = None
        self.training: asyncio.Future[Any] | None = None
        self.sent_bytes = 0
        """By the controller, since the last reset."""
        self.received_bytes = 0
        """By the controller."""


class AnsweringHosts:
    """The hosts of one job (`orchestrator.cluster.hosts.Hosts`): every rank holds what its assignment gives it.

    Args:
        followed: called with each assignment that arrives.
    """

    def __init__(self, followed: Callable[[], None]) -> None:
        self._followed = followed
        self._ranks: dict[int, _Rank] = {}
        self._step = 0
        self._records: tuple[bytes, ...] = ()
        self._sha256 = ""
        self._undecided = frozenset[int]()

    async def reserve(self, ranks: Sequence[int], wait_s: float) -> str | None:
        return None

    def start(self, rank: int) -> None:
        self._ranks[rank] = _Rank(rank)

    async def reclaim(self, rank: int) -> Home:
        raise RankGone(DIED)

    def call(self, rank: int, method: str, *arguments: Any) -> Awaitable[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        there = self._ranks.get(rank)
        if there is None:
            answer.set_exception(RankGone(DIED))
            return answer
        call = pickle.dumps((method, arguments), protocol=5)
        counts = method != HEARTBEAT
        there.sent_bytes += counts * len(call)
        if method == "train":
            there.training = answer
            return answer
        told = pickle.dumps(self._answer(there, method, *pickle.loads(call)[1]), protocol=5)
        there.received_bytes += counts * len(told)
        answer.set_result(pickle.loads(told))
        return answer

    def _answer(self, rank: _Rank, method: str, *arguments: Any) -> Any:
        answer: Any = None
        match method:
            case "setup":
                node = f"node{rank.number // RANKS_PER_NODE}"
                answer = Home(node=node, host="127.0.0.1", pid=rank.number)
            case "position":
                answer = self._position(rank)
            case "records":
                answer = self._records
            case "host_store":
                answer = "127.0.0.1", 1
            case "follow":
                (rank.assignment,) = arguments
                self._followed()
            case _:
                pass
        return answer

    def _position(self, rank: _Rank) -> RankPosition:
        assignment = rank.assignment
        assert assignment is not None
        place, plan = assignment.place, assignment.plan
        undecided = rank.number in self._undecided
        return RankPosition(
            rank=rank.number,
            step=self._step - undecided,
            vector_sha256=None if undecided else self._sha256,
            undecided=self._step if undecided else None,
            began=self._step,
            holds=tuple(sorted({*plan.pieces_of_place(place), *plan.copies_at(place)})),
            host="127.0.0.1",
            port=40_000,
        )

    async def look(self, home: Home) -> None:
        return

    async def end(self, rank: int) -> None:
        self._ranks.pop(rank, None)

    async def room(self, without: Collection[str] = ()) -> int:
        return 0

    def placed_on(self, node: str) -> frozenset[int]:
        return frozenset()

    def started(self, rank: int) -> None:
        return

    def failed(self, rank: int) -> str:
        return ""

    def shun(self, node: str, for_s: float | None = None) -> None:
        return

    async def release(self) -> None:
        self._ranks.clear()

    # What happens to them

    @property
    def trains(self) -> int:
        """How many ranks train."""
        return sum(rank.training is not None and not rank.training.done() for rank in self._ranks.values())

    def commit(self, plan: Plan, undecided: Collection[int]) -> None:
        """Commit one more step; ranks that are `undecided` do not learn of it. Bytes count from here on."""
        self._step += 1
        self._records = records_of(plan, self._step)
        self._sha256 = vector_sha256(self._records)
        self._undecided = frozenset(undecided)
        for rank in self._ranks.values():
            rank.sent_bytes = rank.received_bytes = 0

    def kill(self, victim: int) -> None:
        """End one rank's process: all others that train lose their channels."""
        dead = self._ranks.pop(victim)
        assert dead.training is not None
        dead.training.set_exception(RankGone(DIED))
        for rank in self._ranks.values():
            if rank.training is not None and not rank.training.done():
                rank.training.set_exception(RankError("ChannelError: connection reset", cut_off=True))

    def bytes_of(self, ranks: Collection[int]) -> list[tuple[int, int]]:
        """Of each of `ranks` that lives: bytes sent to it, bytes received from it."""
        return [(r.sent_bytes, r.received_bytes) for n, r in self._ranks.items() if n in ranks]


def records_of(plan: Plan, step: int) -> tuple[bytes, ...]:
    """Every rank's record of the commit of `step`, as ranks that follow `plan` make them."""
    first, last = plan.rank_of_layer(0), plan.rank_of_layer(plan.layers[-1][1] - 1)
    records: list[bytes] = []
    for number in range(plan.world_size):
        place = plan.place(number)
        own = range(place.pipeline * plan.microbatches, (place.pipeline + 1) * plan.microbatches)
        record = CommitRecord(
            rank=number,
            generation=1,
            step=step,
            losses=dict.fromkeys(own, 2.345678901234567) if place.rank == last else {},
            shares=dict.fromkeys(own, 1.0) if place.rank == last else {},
            samples={microbatch: [microbatch] for microbatch in own} if place.rank == first else {},
            squared_norms=(
                dict.fromkeys(plan.layers_of_place(number), 1.234567890123456) if not place.pipeline else {}
            ),
            busy_s=0.123456789,
        )
        records.append(to_json(record))
    return tuple(records)
