"""The actor that owns a job: it turns the crank of the lifecycle and keeps the event log.

Named and detached: it outlives its driver. Never on the data path: the ranks train on without it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

import ray

from orchestrator import cluster, events
from orchestrator.events import EventLog, Record
from orchestrator.folder import JobFolder
from orchestrator.lifecycle import handle
from orchestrator.runtime import Crew, Runtime
from orchestrator.states import (
    Aborted,
    Ask,
    Asked,
    Command,
    Failed,
    Finished,
    GraceOver,
    HostStore,
    Join,
    Leave,
    Load,
    Log,
    Order,
    Pending,
    Place,
    Prepare,
    Release,
    Released,
    Reported,
    Start,
    State,
    Stimulus,
    Train,
    Wait,
)
from workers.protocol import CheckpointReport, JobError, Report, Request

KEPT_RECORDS = 20_000
"""How many of the newest events are kept for drivers; the log has them all."""
KEPT_HISTORY = 200
"""How many of the newest stimuli an illegal transition tells of."""
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


class Controller:
    """The controller of one job. All methods run on one event loop.

    Args:
        spec: the resolved spec, as JSON values.
    """

    def __init__(self, order: Order, crew: Crew, spec: dict[str, Any]) -> None:
        self._order = order
        self._crew = crew
        self._submitted = events.Submitted(
            job=order.job, epoch=order.epoch, spec=spec, resume=bool(order.checkpoints)
        )
        self._folder = JobFolder(crew.config.output)
        self._state: State = Pending()
        self._history: deque[Stimulus] = deque(maxlen=KEPT_HISTORY)
        self._stimuli: asyncio.Queue[Stimulus] = asyncio.Queue()
        self._records: deque[Record] = deque(maxlen=KEPT_RECORDS)
        self._count = 0
        """Events so far, kept or not."""
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        """Everything that runs beside the crank."""
        self._effects: list[asyncio.Task[None]] = []
        """Of these, the commands that a release cuts short."""
        self._lock: IO[bytes] | None = None
        self._log: EventLog | None = None
        self._step = 0
        self._over = False
        self._runtime = Runtime(crew, ray.get_runtime_context().current_actor, self._tell)

    async def start(self) -> None:
        """Take the job on.

        Raises:
            JobError: the folder is another controller's, or cannot be written.
        """
        self._lock = self._folder.lock()
        try:
            self._log = EventLog(self._folder.fetch_events())
        except OSError as error:
            raise JobError(f"cannot write {self._folder.events_path}: {error.strerror or error}") from error
        self._record(self._submitted)
        self._tell(Start())
        self._spawn(self._crank())

    async def report(self, report: Report) -> None:
        """Take a rank's report."""
        self._tell(Reported(report))

    async def request(self, request: Request) -> None:
        """Ask for a checkpoint or a stop."""
        self._tell(Asked(request))

    async def abort(self) -> None:
        """End the job at once, without a checkpoint."""
        self._tell(Aborted())

    async def status(self) -> Status:
        """Where the job stands."""
        return Status(
            job=self._order.job,
            state=type(self._state).__name__.lower(),
            step=self._step,
            steps=self._crew.config.steps,
            output=self._crew.config.output,
        )

    async def read(self, after: int, wait_s: float) -> Page:
        """The events that follow the first `after`; waits up to `wait_s` for one."""
        if self._count <= after and not self._over:
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), wait_s)
        first = self._count - len(self._records)
        fresh = tuple(self._records)[max(0, after - first) :]
        return Page(records=fresh, next=self._count, over=self._over)

    def _tell(self, stimulus: Stimulus) -> None:
        self._stimuli.put_nowait(stimulus)

    async def _crank(self) -> None:
        """Until the job has ended: take a stimulus, ask the lifecycle, do as it says."""
        while not self._over:
            stimulus = await self._stimuli.get()
            try:
                self._state, commands = handle(self._order, self._state, stimulus, tuple(self._history))
                self._history.append(stimulus)
                for command in commands:
                    self._carry_out(command)
            except Exception as error:  # our own mistake: the job must not hang, nor leave anything behind
                await self._give_up(error)
            if isinstance(self._state, Finished | Failed) and not self._over:
                await self._end()

    def _carry_out(self, command: Command) -> None:
        runtime = self._runtime
        match command:
            case Log(event):
                self._record(event)
            case Place():
                self._effects.append(self._spawn(runtime.place()))
            case Prepare():
                self._effects.append(self._spawn(runtime.prepare()))
            case Load(start):
                self._effects.append(self._spawn(runtime.load(start)))
            case HostStore():
                self._effects.append(self._spawn(runtime.host_store()))
            case Join(generation):
                self._effects.append(self._spawn(runtime.join(generation)))
            case Train():
                self._effects.append(self._spawn(runtime.train()))
            case Ask(request):
                runtime.ask(request)
            case Leave(ranks):
                runtime.leave(ranks)
            case Wait(seconds):
                self._effects.append(self._spawn(self._wait(seconds)))
            case Release():
                for effect in self._effects:
                    effect.cancel()
                self._spawn(self._release())

    async def _wait(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._tell(GraceOver())

    async def _release(self) -> None:
        await self._runtime.release()
        self._tell(Released())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            await self._give_up(error)

    async def _give_up(self, error: Exception) -> None:
        """End the job because the controller itself failed."""
        if self._over:
            return
        # What fails now must not hide `error`, nor leave the driver waiting for an end.
        with suppress(Exception):
            await self._runtime.release()
        reason = f"the controller failed: {type(error).__name__}: {error}"
        self._state = Failed(reason, user_error=False)
        self._record(events.Failed(reason=reason, user_error=False))
        await self._end()

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
        ray.kill(ray.get_runtime_context().current_actor)

    def _record(self, event: events.Event) -> None:
        record = Record(time_s=time.time(), event=event)
        if isinstance(event, events.StepReport):
            self._step = event.step
        assert self._log is not None
        # A full disk costs the log a line, not the job its training; the checkpoint says what it costs.
        with suppress(OSError):
            self._log.append(record)
        self._records.append(record)
        self._count += 1
        self._changed.set()
        if isinstance(event, CheckpointReport):
            self._spawn(asyncio.to_thread(self._publish))

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
