"""Ranks as plain processes under the real lifecycle, event loop and runtime: a complete elastic job without
Ray.

Each process handles calls as the Ray actor does: one thread for calls that queue, others for those that must
not wait.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import psutil
from pace import patient
from served_rank import SECRET, serve

from benchmarks.parts.configs import changed
from orchestrator.cluster.exits import UNKNOWN
from orchestrator.cluster.hosts import RankGone
from orchestrator.controller.config import ControllerConfig
from orchestrator.controller.event_loop import EventLoop
from orchestrator.controller.ranks.runtime import Runtime
from orchestrator.events import types as events
from orchestrator.lifecycle.states import JobFinished, Order, State
from orchestrator.lifecycle.stimuli import Reported, Stimulus
from orchestrator.prepare.planning import replanner_of
from orchestrator.prepare.settling import Settled
from planner.observed import StepTimes
from planner.profile import Profile
from workers.actor import Home
from workers.config import WorkerConfig
from workers.control.rank_error import RankError
from workers.launch.processes import forkserver
from workers.process.process_times import ProcessTimes, process_times
from workers.protocol.reports import Report, StepReport

Kind = TypeVar("Kind")


@dataclass
class _Process:
    process: Any
    pipe: Connection
    calls: dict[int, asyncio.Future[Any]] = field(default_factory=dict)


class ProcessHosts:
    """Ranks of one job, as processes on this machine.

    Args:
        node_of: the node that a rank claims to live on.
        room: how many ranks may live at once.
        rig: called in each process with its rank's number before it serves; a function of a module.
        observe: takes what ranks observe of their work.
    """

    def __init__(
        self,
        config: WorkerConfig,
        report: Callable[[Report], None],
        node_of: Callable[[int], str],
        room: int,
        rig: Callable[[int], None] | None = None,
        observe: Callable[[StepTimes], None] = lambda observed: None,
    ) -> None:
        self._config = config
        self._report = report
        self._observe = observe
        self._node_of = node_of
        self.most = room
        self._rig = rig
        self._context: Any = forkserver()
        self._processes: dict[int, _Process] = {}
        self._reserved: set[int] = set()
        self._next = 0
        self.pids: list[int] = []
        """Process ids of all ranks that ever started."""
        self.shunned: list[str] = []

    async def reserve(self, ranks: Sequence[int], wait_s: float) -> str | None:
        if len(self._reserved) + len(ranks) > self.most:
            return f"room for {self.most - len(self._reserved)} ranks, not for {len(ranks)}"
        self._reserved |= set(ranks)
        return None

    def start(self, rank: int) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=serve, args=(self._config, rank, theirs, self._rig), daemon=True
        )
        process.start()
        theirs.close()
        self._processes[rank] = _Process(process, ours)
        self.pids.append(process.pid)
        asyncio.get_running_loop().add_reader(ours.fileno(), self._hear, rank)

    async def reclaim(self, rank: int) -> Home:
        raise RankGone("no controller came before this one")

    def call(self, rank: int, method: str, *arguments: Any) -> Awaitable[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(_retrieved)
        held = self._processes.get(rank)
        if held is None:
            answer.set_exception(RankGone(UNKNOWN))
            return answer
        self._next += 1
        held.calls[self._next] = answer
        try:
            held.pipe.send((self._next, method, arguments))
        except OSError:
            self._lose(rank)
        return self._home(rank, answer) if method == "setup" else answer

    async def _home(self, rank: int, answer: asyncio.Future[tuple[int, int]]) -> Home:
        pid, port = await answer
        return Home(node=self._node_of(rank), host="127.0.0.1", pid=pid, port=port)

    async def look(self, home: Home) -> ProcessTimes:
        return process_times(home.pid)

    async def end(self, rank: int) -> None:
        held = self._processes.get(rank)
        self._reserved.discard(rank)
        if held is not None:
            held.process.kill()
            self._lose(rank)
            await asyncio.to_thread(held.process.join)

    async def room(self, without: Collection[str] = ()) -> int:
        return self.most - len(self._reserved)

    def placed_on(self, node: str) -> frozenset[int]:
        return frozenset(rank for rank in self._reserved if self._node_of(rank) == node)

    def started(self, rank: int) -> None:
        return

    def failed(self, rank: int) -> str:
        return ""

    def shun(self, node: str) -> None:
        self.shunned.append(node)

    def readmit(self, node: str) -> None:
        self.shunned.remove(node)

    async def release(self) -> None:
        for rank in [*self._processes]:
            await self.end(rank)

    def _hear(self, rank: int) -> None:
        held = self._processes[rank]
        try:
            while held.pipe.poll():
                message = held.pipe.recv()
                if message[0] == "report":
                    self._report(message[1])
                    continue
                if message[0] == "observed":
                    self._observe(message[1])
                    continue
                number, well, value = message
                answer = held.calls.pop(number)
                if not answer.done():
                    answer.set_result(value) if well else answer.set_exception(value)
        except (EOFError, OSError):
            self._lose(rank)

    def _lose(self, rank: int) -> None:
        """The process is dead: every pending call to it fails."""
        held = self._processes.pop(rank, None)
        if held is None:
            return
        asyncio.get_running_loop().remove_reader(held.pipe.fileno())
        held.pipe.close()
        for answer in held.calls.values():
            if not answer.done():
                answer.set_exception(RankGone(UNKNOWN))


def _retrieved(answer: asyncio.Future[Any]) -> None:
    """Mark an error as retrieved, since nobody may wait for it any more."""
    if not answer.cancelled():
        answer.exception()


@dataclass
class Ran:
    """How a job went."""

    state: State
    log: list[events.Event]
    pids: list[int]

    def of(self, kind: type[Kind]) -> list[Kind]:
        return [event for event in self.log if isinstance(event, kind)]

    @property
    def state_sha256(self) -> str | None:
        assert isinstance(self.state, JobFinished), self.state
        return self.state.state_sha256

    @property
    def steps(self) -> list[int]:
        """Announced steps, in order."""
        return [report.step for report in self.of(StepReport)]


def assert_gone(pids: Sequence[int]) -> None:
    """Check that none of these processes exists; a killed process may take a moment to disappear."""
    deadline = time.monotonic() + patient(30)
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline, "a process of the job is still there"
        time.sleep(0.02)


class ElasticJob:
    """A job under the real lifecycle.

    Args:
        act: called with this job and each event when the event is logged.
        rig: see `ProcessHosts`.
        timeout_s: see `cluster.timeout_s`; None: a minute on a quiet machine.
        profile: plans are made with it.
        order: fields of the order, for a job that does not start from nothing.
    """

    def __init__(
        self,
        resolved: Settled,
        act: Callable[[ElasticJob, events.Event], None] = lambda job, event: None,
        *,
        node_of: Callable[[int], str] = lambda rank: f"node{rank}",
        room: int | None = None,
        rig: Callable[[int], None] | None = None,
        timeout_s: float | None = None,
        profile: Profile | None = None,
        **order: Any,
    ) -> None:
        timeout_s = patient(60.0) if timeout_s is None else timeout_s
        self.resolved = resolved
        self.log: list[events.Event] = []
        self._act = act
        plan = resolved.plan
        self.setup = ControllerConfig(
            config=changed(resolved.config, wait_s=patient(60.0), timeout_s=timeout_s),
            marker=None,
            replanner=replanner_of(dataclasses.replace(resolved, profile=profile)),
            secret=SECRET,
            profile=profile,
        )
        self.order = Order(
            job=resolved.config.job.name,
            epoch=order.pop("epoch", 1),
            generation=order.pop("generation", 1),
            plan=plan,
            schedule=resolved.schedule,
            elastic=resolved.config.elastic,
            checkpoints=order.pop("checkpoints", ()),
            timeout_s=timeout_s,
            **order,
        )
        self.loop = EventLoop(self.order, self._take)
        self.hosts = ProcessHosts(
            resolved.config,
            lambda report: self.loop.post(Reported(report)),
            node_of,
            plan.world_size if room is None else room,
            rig,
            lambda observed: self.observe(observed),
        )
        self.runtime = Runtime(self.setup, self.hosts, self.loop.post, self.loop.spawn)

    def run(self, limit_s: float = 120.0) -> Ran:
        """Run the job to its end; no process is left."""
        asyncio.run(asyncio.wait_for(self._run(), patient(limit_s)))
        return Ran(self.loop.state, self.log, self.hosts.pids)

    async def _run(self) -> None:
        self.loop.spawn(self.runtime.watch_room())
        try:
            await self.loop.run(self.runtime)
        finally:
            await self.loop.close()
            await self.hosts.release()

    def observe(self, observed: StepTimes) -> None:
        """Take what a rank observed of its work."""

    def post(self, stimulus: Stimulus) -> None:
        self.loop.post(stimulus)

    def signal(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the process of `rank`."""
        started = [
            event for event in self.log if isinstance(event, events.RankStarted) and event.rank == rank
        ]
        with suppress(ProcessLookupError):
            os.kill(started[-1].pid, number)

    def call(self, rank: int, method: str, *arguments: Any) -> None:
        """Call a rank without waiting for it."""
        self.loop.spawn(self._quietly(self.hosts.call(rank, method, *arguments)))

    def call_in_turn(self, *calls: tuple[int, str, Any]) -> None:
        """Call ranks in turn, each after the one before has answered, without waiting for the calls."""

        async def each() -> None:
            for rank, method, argument in calls:
                await self._quietly(self.hosts.call(rank, method, argument))

        self.loop.spawn(each())

    async def _quietly(self, answer: Awaitable[Any]) -> None:
        with suppress(RankGone, RankError):
            await answer

    def _take(self, event: events.Event) -> None:
        self.log.append(event)
        self.runtime.fold(event)
        self._act(self, event)
