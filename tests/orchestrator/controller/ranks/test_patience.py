"""How long a rank's answer is waited for: real processes that sleep, are stopped, or share a core with others."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from orchestrator.cluster.hosts import Hosts
from orchestrator.controller.ranks import heartbeats
from orchestrator.controller.ranks.calls import RankCalls
from orchestrator.controller.ranks.heartbeats import Heartbeats
from orchestrator.controller.ranks.living import LivingRanks
from orchestrator.controller.ranks.patience import Overdue, Patience
from orchestrator.controller.ranks.silence import Silence
from orchestrator.events.types import Stalled, Warned
from orchestrator.lifecycle.stimuli import Noted, RankLost, Stimulus
from workers.actor import Home
from workers.process.process_times import ProcessTimes, Standing, process_times
from workers.protocol.reports import Working

pytestmark = pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="Linux alone tells waits")

LIMIT_S, EVERY_S, MOST_S = 0.8, 0.1, 3.2
PATIENCE_S = 60.0


class Machines:
    """Ranks on machines that can be looked at, or not."""

    def __init__(self, look: Callable[[Home], Awaitable[ProcessTimes | None]] | None = None) -> None:
        self._look = look
        self.answers: dict[int, asyncio.Future[Working | None]] = {}
        self.ended: list[int] = []

    async def look(self, home: Home) -> ProcessTimes | None:
        return process_times(home.pid) if self._look is None else await self._look(home)

    def call(self, rank: int, method: str, *arguments: object) -> Awaitable[Working | None]:
        answer: asyncio.Future[Working | None] = asyncio.get_running_loop().create_future()
        self.answers[rank] = answer
        return answer

    async def end(self, rank: int) -> None:
        self.ended.append(rank)


class Waiting:
    """A controller that waits for rank 0, of which `home` says where it is."""

    def __init__(self, home: Home, machines: Machines, *, timeout_s: float = PATIENCE_S) -> None:
        self.posted: list[Stimulus] = []
        self.machines, self.hosts = machines, cast(Hosts, machines)
        self.living = LivingRanks("", self.hosts, self.posted.append, asyncio.ensure_future)
        self.living.homes[0] = home
        self.patience = Patience(self.hosts, self.living, timeout_s, self.posted.append)

    def answer(self, answer: Awaitable[None]) -> asyncio.Future[tuple[None, Silence]]:
        silence = self.patience.silence_of(0)
        return asyncio.ensure_future(
            self.patience.answer(
                0,
                answer,
                limit_s=LIMIT_S,
                every_s=EVERY_S,
                what="answered nothing for",
                setting="its limit",
                silence=silence,
            )
        )

    @property
    def warned(self) -> list[str]:
        return [
            each.event.text
            for each in self.posted
            if isinstance(each, Noted) and isinstance(each.event, Warned)
        ]

    async def until(self, true: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not true():
                await asyncio.sleep(0.01)


@pytest.fixture
def start() -> Iterator[Callable[[str], Home]]:
    """Starts a Python program on the first core; kills it after the test."""
    started: list[subprocess.Popen[bytes]] = []
    core = min(os.sched_getaffinity(0))

    def begin(program: str) -> Home:
        pinned = f"import os, time; os.sched_setaffinity(0, {{{core}}}); print(flush=True); {program}"
        started.append(subprocess.Popen([sys.executable, "-I", "-S", "-c", pinned], stdout=subprocess.PIPE))
        out = started[-1].stdout
        assert out is not None
        out.readline()
        return Home(node="here", host="h", pid=started[-1].pid)

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def never() -> Awaitable[None]:
    return asyncio.get_running_loop().create_future()


SPIN = "exec('while True: pass')"


def test_a_rank_that_sleeps_is_given_up_at_its_limit(start: Callable[[str], Home]) -> None:
    async def wait() -> None:
        waiting = Waiting(start("time.sleep(600)"), Machines())
        with pytest.raises(Overdue) as overdue:
            await waiting.answer(never())
        assert overdue.value.silence.idle_s >= LIMIT_S
        assert waiting.warned == []

    asyncio.run(wait())


def test_a_rank_that_is_stopped_is_given_up_though_others_want_its_core(start: Callable[[str], Home]) -> None:
    async def wait() -> None:
        home, *_ = [start(SPIN) for _ in range(3)]
        os.kill(home.pid, signal.SIGSTOP)
        with pytest.raises(Overdue, match="its process is stopped"):
            await Waiting(home, Machines()).answer(never())

    asyncio.run(wait())


def test_a_rank_that_others_keep_from_its_core_is_waited_for(start: Callable[[str], Home]) -> None:
    async def wait() -> None:
        home, *_ = [start(SPIN) for _ in range(4)]
        waiting = Waiting(home, Machines())
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        answered = waiting.answer(answer)
        await waiting.until(lambda: waiting.warned or answered.done())
        answer.set_result(None)
        _, silence = await answered
        assert silence.starved_s > 0.5 * LIMIT_S
        (told,) = waiting.warned
        assert told.startswith("rank 0 answered nothing for 0.8 s (its limit), ")
        assert "it waited for a processor" in told
        assert told.endswith(f"It has not hung: it is waited for, {PATIENCE_S / 60:.0f} min 00 s at most")

    asyncio.run(wait())


def test_a_rank_that_runs_for_ever_is_given_up_in_the_end(start: Callable[[str], Home]) -> None:
    async def wait() -> None:
        waiting = Waiting(start(SPIN), Machines(), timeout_s=LIMIT_S)
        with pytest.raises(Overdue, match="the most that a rank is waited for") as overdue:
            await waiting.answer(never())
        assert overdue.value.silence.listened_s >= MOST_S
        assert len(waiting.warned) == 1

    asyncio.run(wait())


async def nobody(home: Home) -> ProcessTimes | None:
    return await asyncio.get_running_loop().create_future()


def test_a_rank_whose_host_is_silent_is_waited_for_unless_another_of_its_ranks_answers() -> None:
    async def wait(*, beside: bool) -> str:
        waiting = Waiting(Home(node="there", host="h", pid=1), Machines(nobody), timeout_s=LIMIT_S)
        waiting.living.homes[1] = Home(node="there" if beside else "elsewhere", host="i", pid=2)

        async def hear() -> None:
            while True:
                await waiting.patience.answer(
                    1, asyncio.sleep(0.01), limit_s=9.0, every_s=1.0, what="", setting=""
                )

        hearing = asyncio.ensure_future(hear())
        with pytest.raises(Overdue) as overdue:
            await waiting.answer(never())
        hearing.cancel()
        return str(overdue.value)

    assert "nothing on its host answered" in asyncio.run(wait(beside=False))
    assert "nothing on its host answered" not in asyncio.run(wait(beside=True))


def test_where_nobody_can_look_a_rank_is_given_up_at_its_limit() -> None:
    async def wait() -> None:
        async def blind(home: Home) -> None:
            return None

        waiting = Waiting(Home(node="there", host="h", pid=1), Machines(blind))
        with pytest.raises(Overdue) as overdue:
            await waiting.answer(never())
        assert overdue.value.silence.silent_s < MOST_S

    asyncio.run(wait())


async def sleeping(home: Home) -> ProcessTimes:
    return ProcessTimes(standing=Standing.SLEEPING, at_s=asyncio.get_running_loop().time())


def listening(waiting: Waiting, *, hang_timeout_s: float) -> asyncio.Future[None]:
    calls = RankCalls(waiting.hosts, waiting.living, waiting.patience, PATIENCE_S, waiting.posted.append)
    beats = Heartbeats(
        calls,
        waiting.living,
        waiting.patience,
        hang_timeout_s=hang_timeout_s,
        timeout_s=PATIENCE_S,
        post=waiting.posted.append,
    )
    return asyncio.ensure_future(beats.listen(0))


def test_a_rank_that_stood_still_and_goes_on_leaves_a_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "PING_EVERY_S", EVERY_S)

    async def listen() -> None:
        waiting = Waiting(Home(node="there", host="h", pid=1), Machines(sleeping))
        beats = listening(waiting, hang_timeout_s=PATIENCE_S)
        answers = waiting.machines.answers
        await waiting.until(lambda: 0 in answers)
        answers.pop(0).set_result(None)
        await waiting.until(lambda: 0 in answers)
        assert waiting.posted == []
        monkeypatch.setattr(heartbeats, "STALL_S", 0.3)
        await asyncio.sleep(0.5)
        answers.pop(0).set_result(None)
        await waiting.until(lambda: 0 in answers)
        beats.cancel()
        (stalled,) = waiting.posted
        assert isinstance(stalled, Noted)
        assert isinstance(stalled.event, Stalled)
        assert (stalled.event.rank, stalled.event.action) == (0, "")
        # Since the answer before, not since the heartbeat that stayed without one.
        assert stalled.event.seconds >= 0.5 + 0.9 * EVERY_S

    asyncio.run(listen())


def test_of_a_slow_action_is_told_once_before_the_rank_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "PING_EVERY_S", EVERY_S)

    async def listen() -> None:
        waiting = Waiting(Home(node="there", host="h", pid=1), Machines(sleeping))
        beats = listening(waiting, hang_timeout_s=LIMIT_S)
        for for_s in (0.4 * PATIENCE_S, 0.6 * PATIENCE_S, 0.8 * PATIENCE_S, PATIENCE_S):
            await waiting.until(lambda: 0 in waiting.machines.answers)
            waiting.machines.answers.pop(0).set_result(Working(action="1F0", for_s=for_s))
        await waiting.until(lambda: waiting.machines.ended)
        beats.cancel()
        told, lost = waiting.posted
        assert isinstance(told, Noted)
        assert isinstance(told.event, Warned)
        assert "has computed 1F0 for 36.0 s: it is killed after 1 min 00 s" in told.event.text
        assert isinstance(lost, RankLost)
        assert "has computed 1F0 for 1 min 00 s, and was killed" in lost.error

    asyncio.run(listen())


def test_a_rank_that_is_killed_has_been_silent_since_its_last_answer() -> None:
    async def listen() -> None:
        waiting = Waiting(Home(node="there", host="h", pid=1), Machines(sleeping))
        beats = listening(waiting, hang_timeout_s=LIMIT_S)
        await waiting.until(lambda: waiting.machines.ended)
        beats.cancel()
        (lost,) = waiting.posted
        assert isinstance(lost, RankLost)
        assert lost.silent_s >= LIMIT_S
        assert lost.error == f"answered nothing for {LIMIT_S:g} s (elastic.hang_timeout_s), and was killed"

    asyncio.run(listen())
