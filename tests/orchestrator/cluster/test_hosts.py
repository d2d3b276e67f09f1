"""Calls to ranks, and which ranks count as dead: not one that answers while the controller itself stalls."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, cast

from pace import patient
from process_hosts import ElasticJob
from ray_jobs import resolved
from tiny_jobs import tiny

from orchestrator.cluster.exits import UNKNOWN
from orchestrator.cluster.hosts import CONNECT_S, Hosts, RankGone, stands
from orchestrator.controller.ranks.runtime import Runtime
from orchestrator.lifecycle.effects import Assess, FinishCommit, Prepare, Train
from orchestrator.lifecycle.recovery import Handover
from orchestrator.lifecycle.stimuli import (
    CommitFinished,
    Departed,
    Noted,
    Positioned,
    RankLost,
    Ready,
    Stimulus,
)
from workers.actor import Home
from workers.control.records_digest import vector_sha256
from workers.process.output import rank_log_path
from workers.protocol.orders import CommitOutcome
from workers.protocol.reports import Parted, RankPosition


def test_who_listens_stands_also_if_the_controller_stood_still() -> None:
    async def look() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            home = Home(node="n", host="127.0.0.1", pid=1, port=port)
            looking = asyncio.ensure_future(stands(home))
            await asyncio.sleep(0)
            time.sleep(CONNECT_S + 0.2)
            assert await looking
        assert not await stands(home)

    asyncio.run(look())


class Shaky:
    """Ranks that are unreachable for a moment, while their process lives and goes on training."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def call(self, rank: int, method: str, *arguments: Any) -> Awaitable[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.calls.append(method)
        if method == "train" or self.calls.count(method) < 3:
            answer.set_exception(RankGone("its process cannot be reached", unreachable=True))
        else:
            answer.set_result(Parted(rank=rank, step=4) if method == "outcome" else None)
        return answer

    async def end(self, rank: int) -> None:
        self.calls.append("end")


def test_a_rank_that_cannot_be_reached_for_a_moment_is_not_taken_for_dead(tmp_path: Path) -> None:
    async def look() -> None:
        hosts, told = Shaky(), list[Stimulus]()
        setup = ElasticJob(resolved(tiny(tmp_path, "shaky"))).setup
        runtime = Runtime(setup, cast(Hosts, hosts), told.append, asyncio.ensure_future)
        await runtime.calls.reached(0, "ping")
        assert hosts.calls == ["ping"] * 3
        training = runtime.carry_out(Train((0,), 3, 1))
        assert training is not None
        await training
        assert told == [Departed(Parted(rank=0, step=4), 1)]
        assert hosts.calls[3:] == ["train"] + ["outcome"] * 3

    asyncio.run(look())


class Crashing:
    """A rank whose process dies while it trains."""

    def call(self, rank: int, method: str, *arguments: Any) -> Awaitable[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        answer.set_exception(RankGone(UNKNOWN))
        return answer

    async def end(self, rank: int) -> None:
        return


def crash(folder: Path) -> Stimulus:
    """What the controller learns about a rank that dies while it trains in the job `folder / "crashing"`."""

    async def train() -> list[Stimulus]:
        told = list[Stimulus]()
        setup = ElasticJob(resolved(tiny(folder, "crashing"))).setup
        runtime = Runtime(setup, cast(Hosts, Crashing()), told.append, asyncio.ensure_future)
        training = runtime.carry_out(Train((0,), 3, 1))
        assert training is not None
        await training
        return told

    (lost,) = asyncio.run(train())
    return lost


def test_how_a_rank_died_is_told_by_its_own_last_words(tmp_path: Path) -> None:
    assert crash(tmp_path) == RankLost(0, f"its process died: {UNKNOWN}", dead=True)
    path = rank_log_path(str(tmp_path / "crashing"), 0)
    path.parent.mkdir(parents=True)
    path.write_text("step by step\nFatal Python error: Segmentation fault\n\nThread 1:\n")
    assert crash(tmp_path) == RankLost(
        0,
        f"its process died: signal SIGSEGV (segmentation fault); its output is in {path}",
        dead=True,
        details="step by step\nFatal Python error: Segmentation fault\nThread 1:",
    )


class Dying:
    """A rank that is up and dies while it trains."""

    def __init__(self) -> None:
        self.ended: list[int] = []

    def start(self, rank: int) -> None:
        return

    def started(self, rank: int) -> None:
        return

    def call(self, rank: int, method: str, *arguments: Any) -> Awaitable[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if method == "setup":
            answer.set_result(Home(node="n", host="127.0.0.1", pid=1))
        elif method == "train":
            answer.set_exception(RankGone(UNKNOWN))
        return answer

    async def look(self, home: Home) -> None:
        return

    async def end(self, rank: int) -> None:
        self.ended.append(rank)

    async def release(self) -> None:
        return


def test_a_death_is_reported_though_the_attempt_that_found_it_is_given_up(tmp_path: Path) -> None:
    """While the dead rank's last output is being read, another rank reports that the generation is over."""

    async def look() -> None:
        hosts, told = Dying(), list[Stimulus]()
        setup = ElasticJob(resolved(tiny(tmp_path, "dying"))).setup
        runtime = Runtime(setup, cast(Hosts, hosts), told.append, asyncio.ensure_future)
        preparing = runtime.carry_out(Prepare((0,)))
        assert preparing is not None
        await preparing
        training = runtime.carry_out(Train((0,), 3, 1))
        assert training is not None
        attempt = asyncio.ensure_future(training)
        while 0 in runtime.homes:
            await asyncio.sleep(0)
        assert hosts.ended == []
        attempt.cancel()
        async with asyncio.timeout(patient(10.0)):
            while not hosts.ended:
                await asyncio.sleep(0.01)
        up, lost = told
        assert isinstance(up, Ready)
        assert lost == RankLost(0, f"its process (pid 1 on 127.0.0.1) died: {UNKNOWN}", dead=True)

    asyncio.run(look())


def test_a_death_that_several_calls_find_is_reported_once_and_says_where(tmp_path: Path) -> None:
    """The training call and a heartbeat fail together: the second must not report sooner with less detail."""

    async def look() -> None:
        told = list[Stimulus]()
        setup = ElasticJob(resolved(tiny(tmp_path, "dying"))).setup
        runtime = Runtime(setup, cast(Hosts, Dying()), told.append, asyncio.ensure_future)
        preparing = runtime.carry_out(Prepare((0,)))
        assert preparing is not None
        await preparing
        await asyncio.gather(*(runtime.living.found_dead(0) for _ in range(3)))
        assert told[1:] == [RankLost(0, f"its process (pid 1 on 127.0.0.1) died: {UNKNOWN}", dead=True)]

    asyncio.run(look())


class Late(Dying):
    """A rank that answers its second heartbeat soon after the controller itself stood still."""

    def __init__(self) -> None:
        super().__init__()
        self.pings = 0

    def call(self, rank: int, method: str, *arguments: Any) -> Awaitable[Any]:
        if method != "ping":
            return super().call(rank, method, *arguments)
        self.pings += 1
        return self._answer(self.pings == 2)

    async def _answer(self, late: bool) -> None:
        if late:
            await asyncio.sleep(0)
            time.sleep(STOOD_STILL_S)
            await asyncio.sleep(HANG_TIMEOUT_S / 2)


HANG_TIMEOUT_S = 0.4
STOOD_STILL_S = 2 * HANG_TIMEOUT_S


def test_a_healthy_rank_keeps_its_time_to_answer_when_the_controller_stood_still(tmp_path: Path) -> None:
    async def look() -> None:
        hosts, told = Late(), list[Stimulus]()
        given = resolved(tiny(tmp_path, "late", elastic={"hang_timeout_s": HANG_TIMEOUT_S}))
        runtime = Runtime(ElasticJob(given).setup, cast(Hosts, hosts), told.append, asyncio.ensure_future)
        preparing = runtime.carry_out(Prepare((0,)))
        assert preparing is not None
        await preparing
        async with asyncio.timeout(patient(10.0)):
            while hosts.pings < 3 and 0 in runtime.homes:
                await asyncio.sleep(0.01)
        assert [type(each) for each in told if not isinstance(each, Noted)] == [Ready]
        assert hosts.ended == []
        await runtime.release()

    asyncio.run(look())


class Tardy:
    """A rank that reports its position before it learns that its generation is over."""

    def __init__(self) -> None:
        self.leaving: list[tuple[int, asyncio.Future[Any]]] = []

    def call(self, rank: int, method: str, *arguments: Any) -> Awaitable[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if method == "leave":
            self.leaving.append((*arguments, answer))
        else:
            answer.set_result(POSITION)
        return answer


POSITION = RankPosition(
    rank=0, step=4, vector_sha256=None, undecided=None, holds=(), freeze_plans=(), host="h", port=1
)


def test_where_a_rank_stands_counts_once_it_has_left(tmp_path: Path) -> None:
    async def look() -> None:
        hosts, told = Tardy(), list[Stimulus]()
        setup = ElasticJob(resolved(tiny(tmp_path, "tardy"))).setup
        runtime = Runtime(setup, cast(Hosts, hosts), told.append, asyncio.ensure_future)
        work = runtime.carry_out(Assess(frozenset({0}), 2, 3))
        assert work is not None
        assessing = asyncio.ensure_future(work)
        await asyncio.sleep(0.05)
        assert told == []
        ((generation, left),) = hosts.leaving
        assert generation == 3
        left.set_result(None)
        await assessing
        assert told == [Positioned(POSITION, 2)]

    asyncio.run(look())


class FinishingRanks:
    """Ranks that finish a commit; rank 0 has its records."""

    def __init__(self) -> None:
        self.told: dict[int, CommitOutcome] = {}

    def call(self, rank: int, method: str, *arguments: Any) -> Awaitable[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if method == "finish_commit":
            (self.told[rank],) = arguments
        answer.set_result(RECORDS if method == "records" else None)
        return answer


RECORDS = (b"a", b"b", b"c")


def finished(folder: Path, sha256: str) -> tuple[list[Stimulus], dict[int, CommitOutcome]]:
    """What is posted, and what ranks 0 to 2 are told, when rank 2 lacks the records that rank 0 has."""

    async def finish() -> tuple[list[Stimulus], dict[int, CommitOutcome]]:
        hosts, told = FinishingRanks(), list[Stimulus]()
        setup = ElasticJob(resolved(tiny(folder, "commit"))).setup
        runtime = Runtime(setup, cast(Hosts, hosts), told.append, asyncio.ensure_future)
        handover = Handover(holder=0, vector_sha256=sha256, lacking=frozenset({2}))
        work = runtime.carry_out(
            FinishCommit(frozenset({0, 1, 2}), CommitOutcome(step=5, reported=4), 2, handover)
        )
        assert work is not None
        await work
        return told, hosts.told

    return asyncio.run(finish())


def test_only_ranks_that_lack_the_records_of_a_commit_get_them(tmp_path: Path) -> None:
    posted, told = finished(tmp_path, vector_sha256(RECORDS))
    assert {rank: each.vector for rank, each in told.items()} == {0: None, 1: None, 2: RECORDS}
    assert {each.step for each in told.values()} == {5}
    assert sorted(posted, key=repr) == [CommitFinished(rank, 2) for rank in (0, 1, 2)]


def test_records_that_are_not_those_that_were_named_finish_nothing(tmp_path: Path) -> None:
    posted, told = finished(tmp_path, vector_sha256((b"a", b"bc")))
    assert told == {}
    (lost,) = posted
    assert isinstance(lost, RankLost)
    assert (lost.rank, lost.round, lost.dead) == (0, 2, False)
    assert "not those that it had named" in lost.error
