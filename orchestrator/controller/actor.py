"""The actor that owns a job: the crank's Ray shell. It keeps the event log, and answers drivers.

Named and detached: it outlives its driver, and Ray starts it again where it was killed. Never on the data path: the
ranks train on without it.
"""

from __future__ import annotations

import asyncio
import os
import time
import traceback
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import IO, Any

import ray

from orchestrator.cluster import connection as cluster
from orchestrator.cluster.ray_hosts import RayHosts, named_ranks, reap
from orchestrator.controller.config import ControllerConfig
from orchestrator.controller.drains import watch_drains
from orchestrator.controller.event_loop import EventLoop, Work
from orchestrator.controller.faults import inject
from orchestrator.controller.freeze_watch import FreezeWatch
from orchestrator.controller.move_request import described, move_of_layers, move_to, parse_layers
from orchestrator.controller.planner_link import PlannerLink, link_planner
from orchestrator.controller.runtime import Runtime
from orchestrator.events import types as events
from orchestrator.events.folder import JobFolder
from orchestrator.events.types import EventLog, Record
from orchestrator.history.job_view import JobView, fold
from orchestrator.lifecycle.commands import Command, Train
from orchestrator.lifecycle.states import Live, Order, Roster, Training
from orchestrator.lifecycle.stimuli import Aborted, Asked, Migrate, Noted, Reported
from orchestrator.lifecycle.takeover import since_start, taken_over
from orchestrator.prepare.resolve import expand
from planner.plan import Plan, PlanError
from workers.protocol import CheckpointReport, JobError, Report, Request

KEPT_RECORDS = 20_000
"""How many of the newest events are kept for drivers; the log has them all."""
RETRY_S = 1.0
"""Before a controller tries again to take over from the one before it, whose lock may outlive it a little."""
PATIENCE_S = 60.0
"""How long what is asked of a controller waits for it to take the job over."""
LINGER_S = 60.0
"""How long an ended job's controller waits for a driver that wants to hear of it."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """Some events of a job."""

    records: tuple[Record, ...]
    next: int
    """What to ask for to get those that follow."""
    over: bool
    """Whether the job has ended and these are its last events."""


@dataclass(frozen=True, kw_only=True)
class Status:
    """Where a job stands."""

    job: str
    state: str
    step: int
    steps: int
    output: str
    pid: int
    """Of the controller's process."""
    ranks: tuple[int, ...]
    """Numbers of the ranks that are up."""


class Controller:
    """The controller of one job. All methods run on one event loop.

    Args:
        spec: the resolved spec, as JSON values.
    """

    def __init__(self, order: Order, setup: ControllerConfig, spec: dict[str, Any]) -> None:
        self._order = order
        self._setup = setup
        self._spec = spec
        self._folder = JobFolder(setup.config.output)
        self._records: deque[Record] = deque(maxlen=KEPT_RECORDS)
        self._view = JobView()
        """Of the whole log."""
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        """What outlives the crank."""
        self._lock: IO[bytes] | None = None
        self._log: EventLog | None = None
        self._begun = asyncio.Event()
        """The job is taken on, or is over."""
        self._over = False
        self._planner: PlannerLink | None = None
        self._planning: asyncio.Task[None] | None = None
        self._own = ray.get_runtime_context().current_actor
        self._take_on(order)
        if ray.get_runtime_context().was_current_actor_reconstructed:
            # Ray makes this object on the actor's loop. A call to itself would not come where the driver is dead.
            self._spawn(self._resume())

    def _take_on(self, order: Order) -> None:
        self._order = order
        self._loop = EventLoop(order, self._record)
        self._hosts = RayHosts(self._setup.ranks, self._own)
        self._runtime = self._make_runtime()
        self._watch = FreezeWatch(order.freezing)

    def _make_runtime(self) -> Runtime:
        return Runtime(self._setup, self._hosts, self._loop.post, self._loop.spawn)

    async def start(self) -> None:
        """Take the job on.

        Raises:
            JobError: the folder is another controller's, or cannot be written.
        """
        self._lock = self._folder.lock()
        try:
            path = self._folder.fetch_events()
            self._view = fold(events.read(path)) if path.exists() else JobView()
            self._view.events = 0
            self._log = EventLog(path)
        except OSError as error:
            raise JobError(f"cannot write {self._folder.events_path}: {error.strerror or error}") from error
        await asyncio.to_thread(reap, self._order.job)
        self._begin(takeover=False)

    async def _resume(self) -> None:
        """Go on where an earlier controller of this job was killed: Ray starts this one in its place."""
        while True:
            try:
                await self._take_over()
            except Exception:
                # What Ray logs is all that can be seen of it: nobody waits for this.
                traceback.print_exc()
                await asyncio.sleep(RETRY_S)
            else:
                return

    async def _take_over(self) -> None:
        path = self._folder.events_path
        if not path.exists():
            path = self._folder.fetch_events()
        self._records.clear()
        log = list(events.read(path)) if path.exists() else []
        self._view = fold(log)
        records = since_start(log)
        if not any(
            isinstance(record.event, events.Submitted) and record.event.epoch == self._order.epoch
            for record in records
        ):
            return  # killed before it had taken the job on, which the driver hears
        self._records.extend(records)
        if self._view.outcome is not None:
            self._over = True
            self._begun.set()
            self._spawn(self._linger())
            return
        # An attempt before this one may hold it already.
        self._lock = self._lock or self._folder.lock()
        self._log = EventLog(path)
        order = taken_over(self._order, self._view, expand)
        assert order.roster is not None
        left = await asyncio.to_thread(named_ranks, order.job)
        unknown = left - order.roster.alive if order.roster.trained else left
        await asyncio.to_thread(reap, order.job, unknown)
        roster = replace(order.roster, next_rank=max((order.roster.next_rank - 1, *left)) + 1)
        self._take_on(replace(order, roster=roster))
        for record in records:
            self._runtime.take(record.event)
        self._begin(takeover=True)

    def _begin(self, *, takeover: bool) -> None:
        self._record(
            events.Submitted(
                job=self._order.job,
                epoch=self._order.epoch,
                spec=self._spec,
                resume=bool(self._order.checkpoints),
                takeover=takeover,
            )
        )
        self._spawn(self._run())
        self._begun.set()

    async def report(self, report: Report) -> None:
        """Take a rank's report; once this returns it is logged, and the rank forgets it.

        Raises:
            JobError: the job is not taken over yet, or is over. The rank keeps the report, and is asked for it then.
        """
        if self._over or not self._begun.is_set():
            raise JobError("the controller has not taken the job over yet")
        await self._loop.post_and_wait(Reported(report))

    async def request(self, request: Request) -> None:
        """Ask for a checkpoint or a stop; one that comes while the job is being taken over waits for that."""
        await self._taken_on()
        self._loop.post(Asked(request))

    async def move(self, layers: str, rank: int) -> str:
        """Have layers change ranks while the job trains, as `elastic.migration` says; what will happen, in words.

        Args:
            layers: `3` or `3-4`.

        Raises:
            JobError: no such layers or rank, they are not next to it, do not fit its memory, or the job does not train.
        """
        span, roster = parse_layers(layers), await self._training()
        mode = self._setup.config.elastic.migration
        move = move_of_layers(roster, self._setup.replanner, span, rank, mode=mode, asked_s=time.time())
        self._loop.post(Migrate(move))
        return described(roster, move)

    async def migrate(self, plan: Plan) -> str:
        """Have the ranks follow `plan`, in the same places; what will happen, in words.

        Raises:
            JobError: it does not fit the memory, or the job does not train.
        """
        roster, mode = await self._training(), self._setup.config.elastic.migration
        try:
            move = move_to(roster, self._setup.replanner, plan, mode=mode, asked_s=time.time())
        except PlanError as error:
            raise JobError(str(error)) from error
        self._loop.post(Migrate(move))
        return described(roster, move)

    async def _taken_on(self) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._begun.wait()
        except TimeoutError:
            raise JobError(
                f"the controller has tried to take the job over for {PATIENCE_S:g} s: its log says why; ask again, or"
                " clear the job with freshet reap --force"
            ) from None

    async def _training(self) -> Roster:
        await self._taken_on()
        state = self._loop.state
        if not isinstance(state, Training):
            raise JobError(
                f"the job is {type(state).__name__.lower()}: layers move while it trains; ask again then"
            )
        return state.roster

    async def abort(self) -> None:
        """End the job at once, without a checkpoint."""
        await self._taken_on()
        self._loop.post(Aborted())

    async def fault(self, drill: dict[str, Any]) -> str:
        """Have a drill strike the job; what will happen, in words.

        Args:
            drill: an `orchestrator.controller.faults.Drill`, as JSON values.

        Raises:
            JobError: the job allows no faults, or there is no such rank or node.
        """
        elastic = self._setup.config.elastic
        return await inject(self._order.job, elastic.allow_faults, self._view.step, drill)

    async def status(self) -> Status:
        """Where the job stands."""
        return Status(
            job=self._order.job,
            state=type(self._loop.state).__name__.lower(),
            step=self._view.step,
            steps=self._setup.config.steps,
            output=self._setup.config.output,
            pid=os.getpid(),
            ranks=tuple(sorted(self._view.ranks.alive)),
        )

    async def read(self, after: int, wait_s: float) -> Page:
        """The events that follow the first `after`; waits up to `wait_s` for one."""
        if self._view.events <= after and not self._over:
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), wait_s)
        first = self._view.events - len(self._records)
        fresh = tuple(self._records)[max(0, after - first) :]
        return Page(records=fresh, next=self._view.events, over=self._over)

    async def _run(self) -> None:
        """The job, to its end."""
        loop, runtime = self._loop, self._runtime
        if "ray" in self._setup.config.elastic.notices:
            loop.spawn(watch_drains(lambda: runtime.homes, loop.post))
        loop.spawn(runtime.watch_room())
        await loop.run(self)
        await loop.close()
        await self._end()

    def carry_out(self, command: Command) -> Work | None:
        """Have the ranks do it; with training a planner goes along."""
        if isinstance(command, Train):
            self._accompany(command.step)
        return self._runtime.carry_out(command)

    async def release(self) -> None:
        """End all ranks."""
        await self._runtime.release()

    def _accompany(self, step: int) -> None:
        """Have a planner for the plan that is trained with; one that has decided is kept."""
        state = self._loop.state
        assert isinstance(state, Live)
        roster = state.roster
        if self._planner is not None and self._planner.serves(roster.plan):
            self._planner.void_after(step)
            return
        if self._planning is not None:
            self._planning.cancel()
        first = self._planner is None
        self._planner = link_planner(
            self._order, self._setup, roster.plan, roster.schedule, self._loop.post, first=first
        )
        if self._planner is not None:
            self._planner.void_after(step)
            self._planning = self._loop.spawn(self._planner.run(step))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end(self) -> None:
        with suppress(Exception):
            await asyncio.to_thread(self._publish)
        if self._log is not None:
            self._log.close()
        if self._lock is not None:
            self._lock.close()
        self._over = True
        self._changed.set()
        self._spawn(self._linger())

    async def _linger(self) -> None:
        await asyncio.sleep(LINGER_S)
        ray.kill(self._own)

    def _record(self, event: events.Event) -> None:
        record = Record(time_s=time.time(), event=event)
        assert self._log is not None
        # A full disk costs the log a line, not the job its training; the checkpoint says what it costs.
        with suppress(OSError):
            self._log.append(record)
        self._records.append(record)
        self._view.take(record)
        self._changed.set()
        if isinstance(event, CheckpointReport):
            self._spawn(asyncio.to_thread(self._publish))
        self._runtime.take(event)
        if isinstance(event, events.Migrated):
            self._accompany(event.step)
        if self._planner is not None:
            self._planner.take(event)
        if (warning := self._watch.take(event)) is not None:
            self._loop.post(Noted(warning))

    def _publish(self) -> None:
        """Copy the event log to where the job's folder is, if that is elsewhere."""
        with suppress(OSError):
            self._folder.publish(self._folder.events_path)


def find(job: str) -> Any:
    """The controller of `job`, or None."""
    try:
        return ray.get_actor(job, namespace=cluster.NAMESPACE)
    except ValueError:
        return None
