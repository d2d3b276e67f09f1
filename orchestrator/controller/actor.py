"""The actor that owns a job: the event loop's Ray adapter. It keeps the event log and answers drivers.

Named and detached: it outlives its driver, and Ray restarts it if it is killed. Never on the data path: the
ranks train on without it.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import IO, Any, NamedTuple

import ray

from orchestrator.cluster.actor_arguments import from_pieces
from orchestrator.cluster.actor_names import NAMESPACE, living_ranks
from orchestrator.cluster.ray_hosts import RayHosts, reap
from orchestrator.controller.adapt.adaptation import Adaptation, live_start
from orchestrator.controller.adapt.memory_relief import MemoryRelief
from orchestrator.controller.client_commands import Commands
from orchestrator.controller.config import ControllerConfig
from orchestrator.controller.event_loop import EventLoop, Work
from orchestrator.controller.freeze.freeze_control import FreezeControl
from orchestrator.controller.freeze.freeze_watch import Costly, FreezeWatch, outcome
from orchestrator.controller.log_writer import LogWriter, Publisher
from orchestrator.controller.outlets import Outlets
from orchestrator.controller.planning.planner_process import PlannerProcess
from orchestrator.controller.planning.profile_watch import ProfileWatch
from orchestrator.controller.ranks.drains import watch_drains
from orchestrator.controller.ranks.runtime import Runtime
from orchestrator.controller.reshaping import Reshaping
from orchestrator.controller.retry import persist
from orchestrator.events import types as events
from orchestrator.events.log import DamagedLogError
from orchestrator.events.page import Page, page_of
from orchestrator.events.segments import PUBLISH_S
from orchestrator.events.types import Record
from orchestrator.garbage import exclude_kept_objects
from orchestrator.history.folder import JobFolder
from orchestrator.history.folder_view import load_folder
from orchestrator.history.job_view import JobView
from orchestrator.history.proposal import Proposal
from orchestrator.history.recap import recap
from orchestrator.lifecycle import states
from orchestrator.lifecycle.effects import Effect, Train
from orchestrator.lifecycle.states import Order
from orchestrator.lifecycle.stimuli import Noted, Reported
from orchestrator.lifecycle.takeover import start_of, taken_over
from orchestrator.prepare.profile_cache import cache_folder, mark_stale
from planner.observed import StepTimes
from workers.actor import check_folder
from workers.checkpoint.left_behind import clear
from workers.protocol.errors import JobError
from workers.protocol.reports import FreezeStarted, Report

KEPT_RECORDS = 20_000
"""Number of newest events kept in memory for drivers; the log has them all."""
RETRY_S = 1.0
"""Before a controller tries again to take over from the previous one, whose lock may outlive it a little."""
TAKEOVER_S = 60.0
"""Time limit for a takeover, after which the job fails."""
SNAPSHOT_S = 5.0
"""Between two snapshots of the view: a controller that takes over reads the events since the last one."""
FOLDER_S = 10.0
"""Time limit for a restarted controller to find the job's folder."""
DUE_S = 0.002
"""Delay before a view is written as JSON."""
PATIENCE_S = 60.0
"""Time limit for a request that waits for the controller to take the job over."""
LINGER_S = 60.0
"""Time that an ended job's controller stays for drivers that ask for the outcome."""


Hearer = Callable[[Record], object]


class Hearers(NamedTuple):
    """Parts of the controller that hear of each event, in this order."""

    log: Hearer
    """First: nothing happens for an event before it is on its way to the file."""
    recent: Hearer
    view: Hearer
    """Before all that look into the view."""
    outlets: Hearer
    drivers: Hearer
    """Callers that wait for an event or a command's outcome: `recent` and `view` have it."""
    snapshot: Hearer
    """After the log and the view, which it puts side by side."""
    runtime: Hearer
    memory: Hearer
    """Before freezing and adaptation, which plan within a rank's new limit."""
    freezing: Hearer
    adaptation: Hearer
    freeze_watch: Hearer
    profile_watch: Hearer


class Controller:
    """The controller of one job. All methods run on one event loop.

    Args:
        pieces: of the order, the configuration and the resolved spec as JSON values, from `in_pieces`: they have to
            outlive the driver too.
    """

    def __init__(self, *pieces: bytes) -> None:
        order: Order
        setup: ControllerConfig
        spec: dict[str, Any]
        order, setup, spec = from_pieces(pieces)
        self._order = order
        self._setup = setup
        self._spec = spec
        self._folder = JobFolder(setup.config.job.folder)
        self._records: deque[Record] = deque(maxlen=KEPT_RECORDS)
        self._view = JobView()
        """View of the whole log."""
        self._shown: tuple[tuple[int, float, str], bytes] | None = None
        """The view as clients get it, and what it depends on."""
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        """Tasks that outlive the event loop."""
        self._lock: IO[bytes] | None = None
        self._writer: LogWriter | None = None
        self._kept_s = -math.inf
        """When the newest snapshot was taken."""
        self._publisher = Publisher(
            self._folder.publish_log, lambda text: self._record(events.Warned(text=text))
        )
        self._publishing: asyncio.Task[None] | None = None
        self._torn_bytes = 0
        """Length of a line that the previous controller did not finish."""
        self._trouble = ""
        self._begun = asyncio.Event()
        """Set once the job has started or been taken over, or is over."""
        self._over = False
        self._refusal: Record | None = None
        """The end of a job that this controller could not take over."""
        self._outlets: Outlets | None = None
        self._own = ray.get_runtime_context().current_actor
        self._take_on(order)
        if ray.get_runtime_context().was_current_actor_reconstructed:
            # Ray creates this object on the actor's loop. A call to itself fails if the driver is dead.
            self._spawn(self._resume())

    def _take_on(self, order: Order) -> None:
        self._order = order
        self._loop = EventLoop(order, self._record, self._written)
        self._hosts = RayHosts(self._setup.ranks, self._own)
        self._runtime = self._make_runtime()
        self._reshaping = Reshaping(order, self._setup, self._loop, self._runtime, self._hosts)
        self._watch = FreezeWatch(order.freezing)
        self._profile_watch = ProfileWatch(self._setup.profile)
        planner = PlannerProcess(
            lambda: live_start(self._setup, self._view), self._loop.post, self._loop.spawn
        )
        self._freezing = FreezeControl(
            order, self._setup, self._loop, lambda: self._view, self._runtime.planning, planner
        )
        self._adaptation = Adaptation(
            self._setup,
            self._loop,
            lambda: self._view,
            self._runtime.planning,
            self._reshaping.migrate,
            planner,
            self._freezing.solve_again,
            self._freezing.budget,
        )
        self._memory = MemoryRelief(
            self._setup,
            self._loop,
            lambda: self._view,
            self._runtime.planning,
            self._reshaping.migrate,
            self._adaptation.decide_again,
        )
        self._commands = Commands(
            order.job,
            self._setup.config.elastic,
            self._loop,
            self._reshaping,
            self._freezing,
            lambda: self._view,
            self._record,
        )

    def _make_runtime(self) -> Runtime:
        return Runtime(self._setup, self._hosts, self._loop.post, self._loop.spawn)

    async def start(self) -> None:
        """Start the job.

        Raises:
            JobError: another controller has the folder, its log is damaged, or it cannot be written.
        """
        self._lock = self._folder.lock()
        try:
            await self._load()
            self._view.events = 0
            self._records.clear()
            await self._open_log(self._order.epoch)
        except DamagedLogError as error:
            raise JobError(f"{error}: delete that line to do without it") from error
        except OSError as error:
            raise JobError(f"cannot write {self._folder.events_path}: {error.strerror or error}") from error
        await asyncio.to_thread(reap, self._order.job)
        self._begin(takeover=False)

    async def _load(self) -> None:
        """Read the log up to now.

        Raises:
            OSError: it cannot be read.
            DamagedLogError: a line of it is no event.
        """
        loaded = await asyncio.to_thread(load_folder, self._folder)
        self._view = loaded.view
        self._records = deque(loaded.recent, maxlen=KEPT_RECORDS)
        self._torn_bytes = self._torn_bytes or loaded.torn_bytes
        if loaded.damage is not None:
            raise loaded.damage

    async def _open_log(self, epoch: int) -> None:
        """Open the log for writing, as the controller of incarnation `epoch`."""
        if self._writer is None:
            log = await asyncio.to_thread(self._folder.open_log, epoch)
            self._writer = LogWriter(log, self._folder.snapshot_path)

    async def _resume(self) -> None:
        """Take over after an earlier controller of this job was killed: Ray starts this one in its place,
        maybe on another node. The job fails if its log is damaged or if taking over keeps failing for
        `TAKEOVER_S`."""
        if (reason := await self._blind()) is not None:
            await self._refuse(reason)
            return

        def note(trouble: str) -> None:
            self._trouble = trouble

        why = await persist(
            self._take_over, note, for_s=TAKEOVER_S, every_s=RETRY_S, hopeless=DamagedLogError
        )
        if why is not None:
            await self._fail(f"the controller was killed, and the next one cannot take the job over: {why}")

    async def _fail(self, reason: str) -> None:
        """End a job that was not taken over."""
        with suppress(Exception):
            await asyncio.to_thread(reap, self._order.job)
        logged = self._view.commands.logged(events.Failed(reason=reason, user_error=True))
        self._loop.state = states.JobFailed(reason, user_error=True)
        with suppress(OSError, JobError):  # another run may hold the folder: its log is not ours to write
            self._lock = self._lock or self._folder.lock()
            await self._open_log(max(self._view.epoch, self._order.epoch) + 1)
        for event in logged:
            record = Record(time_s=time.time(), event=event)
            self._view.fold(record)
            self._records.append(record)
            if self._writer is not None:
                self._writer.append(record)
        self._begun.set()
        await self._end()

    async def _blind(self) -> str | None:
        """Return why this node cannot take the job over: it does not see the job's folder. None: it does."""
        marker, output = self._setup.marker, self._setup.config.job.folder
        if marker is None or "://" in output:
            return None
        deadline_s = time.monotonic() + FOLDER_S
        while True:
            try:
                await asyncio.to_thread(check_folder, output, marker, ray.util.get_node_ip_address())
            except JobError as error:
                if time.monotonic() > deadline_s:
                    return (
                        f"the controller was lost, and the one in its place has no log to go on from: {error}"
                    )
                await asyncio.sleep(RETRY_S)
            else:
                return None

    async def _refuse(self, reason: str) -> None:
        """End the job without its folder; clients that ask get the reason."""
        await asyncio.to_thread(reap, self._order.job)
        end = events.Failed(reason=f"{reason}. Where the folder is, --resume goes on", user_error=False)
        self._refusal = Record(time_s=time.time(), event=end)
        self._view.fold(self._refusal)
        self._loop.state = states.JobFailed(end.reason, user_error=False)
        self._over = True
        self._begun.set()
        self._changed.set()
        self._spawn(self._linger())

    async def _take_over(self) -> None:
        await self._load()
        if self._view.epoch < self._order.epoch:
            return  # killed before the job had started: the driver gets the error
        if self._view.outcome is not None:
            await self._publisher.publish()
            self._over = True
            self._begun.set()
            self._spawn(self._linger())
            return
        # An earlier attempt may hold the lock already.
        self._lock = self._lock or self._folder.lock()
        order = taken_over(self._order, self._view)
        assert order.earlier is not None
        left = await asyncio.to_thread(living_ranks, order.job)
        unknown = left - order.earlier.membership.alive if order.earlier.progress.trained else left
        await asyncio.to_thread(reap, order.job, unknown)
        job = replace(
            order.earlier,
            membership=replace(
                order.earlier.membership, next_rank=max((order.earlier.membership.next_rank - 1, *left)) + 1
            ),
        )
        await self._open_log(order.epoch)
        watch = FreezeWatch(self._order.freezing)
        watch.catch_up(self._view, start_of(self._order))
        self._take_on(replace(order, earlier=job))
        self._watch = watch
        for event in recap(self._view):
            self._runtime.fold(event)
        self._memory.go_on()
        self._adaptation.go_on()
        self._begin(takeover=True)
        self._commands.go_on()

    def _begin(self, *, takeover: bool) -> None:
        folder = self._folder.events_path.parent
        self._outlets = Outlets(self._view, self._spec, folder, self._loop.post)
        self._record(
            events.Submitted(
                job=self._order.job,
                epoch=self._order.epoch,
                spec=self._spec,
                resume=bool(self._order.checkpoints),
                takeover=takeover,
                train_samples=self._setup.train_samples,
            )
        )
        if self._setup.unmatched is not None and not takeover:
            self._record(self._setup.unmatched)
        if self._torn_bytes:
            cut = f"its writer was killed before it had finished; {self._torn_bytes} bytes are left out"
            text = f"the last line of the event log was torn: {cut}"
            self._record(events.Warned(text=text))
        earlier = self._order.earlier
        step = start_of(self._order) if earlier is None else earlier.progress.step
        for plan in self._order.freezing.plans:
            if (plan.start or 0) <= step + 1:
                self._runtime.fold(FreezeStarted(plan=plan))
        for first, prefix in sorted(self._view.freeze.prefixes.items()):
            # One that is told ranks train with, however few steps were reported since.
            if takeover or first <= step + 1:
                self._runtime.fold(prefix)
        self._adaptation.run()
        self._spawn(self._run())
        self._loop.spawn(self._outlets.keep_recording(self._view))
        if self._folder.segments is not None:
            publishing = self._publisher.keep_publishing(PUBLISH_S)
            self._publishing = asyncio.get_running_loop().create_task(publishing)
        self._begun.set()

    async def report(self, report: Report) -> str | None:
        """Take a rank's report; once this returns it is logged, and the rank forgets it.

        Returns:
            The hash of a line of the log that is there to stay, for the manifests of checkpoints: the newest one, or
            where the log is copied to a store the newest one that has been copied, if any.

        Raises:
            JobError: the job is not taken over yet, or is over. The rank keeps it until it is asked for it.
        """
        if self._over or not self._begun.is_set():
            raise JobError("the controller has not taken the job over yet")
        await self._loop.post_and_wait(Reported(report))
        assert self._writer is not None
        return self._folder.durable_head(await self._writer.written())

    async def observe(self, batch: Sequence[StepTimes]) -> None:
        """Take what a rank observed of its work. Nothing of it is logged as it is, and nobody waits for it."""
        if self._begun.is_set() and not self._over:
            self._adaptation.observe(batch)

    async def command(self, id: str, name: str, arguments: dict[str, Any], by: str = "") -> str:
        """Carry out a client's command, once for each `id`; return in words what will happen.

        Args:
            name: in the log, one of `orchestrator.commands.table.BY_LOG_NAME`.
            arguments: the command's fields, as JSON values.
            by: who sent it and from where.

        Raises:
            CommandIdReused: another command had this id.
            PlanChanged: it is for an older plan than the newest one.
            JobError: the command is refused; says why.
        """
        await self._taken_on()
        return await self._commands.accept(events.Commanded(id=id, name=name, arguments=arguments, by=by))

    async def outcome(self, id: str, wait_s: float) -> events.Answered | None:
        """Return the outcome of the command `id`; None if there is none after `wait_s`.

        Raises:
            JobError: no such command is known.
        """
        await self._taken_on()
        deadline_s = time.monotonic() + wait_s
        while True:
            if (entry := self._view.commands.get(id)) is None:
                raise JobError(
                    f"job {self._order.job!r} knows no command {id!r}: it was never sent, or is too old"
                )
            if entry.answer is not None or (left_s := deadline_s - time.monotonic()) <= 0:
                return entry.answer
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left_s)

    async def learn(self, flops_per_sample: float) -> None:
        """Log what the job's submitter has counted: floating-point operations of a sample."""
        await self._taken_on()
        if not self._over and self._view.flops_per_sample != flops_per_sample:
            self._loop.post(Noted(events.FlopsCounted(flops_per_sample=flops_per_sample)))

    async def propose(self, partition: list[int] | None) -> Proposal:
        """Return what another partition would bring; None: the planner's own best. Nothing changes.

        Raises:
            JobError: the job does not train.
        """
        await self._taken_on()
        return await self._reshaping.propose(partition)

    async def _taken_on(self) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._begun.wait()
        except TimeoutError:
            raise JobError(
                f"the controller has tried to take the job over for {PATIENCE_S:g} s: its log says why; ask again, or"
                " clear the job with freshet reap --force"
            ) from None

    async def view(self) -> bytes:
        """Return the job's state and history: a `JobView` as JSON."""
        # It takes the loop some 20 ms: whatever else is due goes first.
        await asyncio.sleep(DUE_S)
        # Clients that ask at once share the work.
        state = (self._view.events, self._view.last_s, self._trouble)
        if self._shown is None or self._shown[0] != state:
            spec = self._view.spec or self._spec
            seen = replace(self._view, job=self._order.job, spec=spec, trouble=self._trouble, pid=os.getpid())
            self._shown = state, seen.to_json()
        return self._shown[1]

    async def read(self, after: int, wait_s: float) -> Page:
        """Return the events that follow the first `after`; wait up to `wait_s` for one."""
        if self._view.events <= after and not self._over:
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), wait_s)
        if self._refusal is not None:
            return Page(records=(self._refusal,), missed=0, next=after + 1, over=True)
        return page_of(self._records, self._view.events, after, over=self._over)

    async def _run(self) -> None:
        """Run the job to its end."""
        loop, runtime = self._loop, self._runtime
        if "ray" in self._setup.config.elastic.notices:
            loop.spawn(watch_drains(lambda: runtime.homes, loop.post))
        loop.spawn(runtime.watch_room())
        await loop.run(self)
        await loop.close()
        await self._end()

    def carry_out(self, effect: Effect) -> Work | None:
        """Have the ranks carry out `effect`; training also gets a planner."""
        if isinstance(effect, Train):
            self._freezing.accompany(effect.step)
        return self._runtime.carry_out(effect)

    async def release(self) -> None:
        """End all ranks."""
        await self._runtime.release()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end(self) -> None:
        if self._outlets is not None:
            await self._outlets.close(self._view)
        if self._publishing is not None:
            self._publishing.cancel()
        if self._writer is not None:
            self._writer.keep(self._view.to_json())
            await self._writer.close()
        await self._publisher.publish()
        if self._view.rescued:
            # The head came back, and the log has what ranks had left beside it.
            with suppress(OSError):
                await asyncio.to_thread(clear, self._folder.location)
        if self._lock is not None:
            self._lock.close()
        self._over = True
        self._changed.set()
        self._spawn(self._linger())

    async def _linger(self) -> None:
        await asyncio.sleep(LINGER_S)
        ray.kill(self._own)

    def _record(self, event: events.Event) -> None:
        for each in self._view.commands.logged(event):
            self._record_one(each)

    def _record_one(self, event: events.Event) -> None:
        record = Record(time_s=time.time(), event=event)
        for hear in self._hearers():
            hear(record)

    def _hearers(self) -> Hearers:
        """The parts as they are now: a takeover makes some of them again."""
        assert self._writer is not None
        return Hearers(
            log=self._writer.append,
            recent=self._records.append,
            view=self._view.fold,
            outlets=lambda record: None if self._outlets is None else self._outlets.fold(record),
            drivers=lambda record: self._changed.set(),
            snapshot=self._keep_snapshot,
            runtime=lambda record: self._runtime.fold(record.event),
            memory=lambda record: self._memory.fold(record.event),
            freezing=lambda record: self._freezing.fold(record.event),
            adaptation=lambda record: self._adaptation.fold(record.event),
            freeze_watch=self._watch_freezing,
            profile_watch=self._watch_profile,
        )

    def _keep_snapshot(self, record: Record) -> None:
        if time.monotonic() - self._kept_s > SNAPSHOT_S:
            assert self._writer is not None
            self._kept_s = time.monotonic()
            exclude_kept_objects()
            self._writer.keep(self._view.to_json())

    def _watch_freezing(self, record: Record) -> None:
        match self._watch.fold(record.event):
            case None:
                pass
            case Costly() as costly:
                self._spawn(self._freezing.freeze_less(costly))
            case warning:
                self._loop.post(Noted(warning))
        if (told := outcome(record.event, self._view)) is not None:
            self._loop.post(Noted(told))

    def _watch_profile(self, record: Record) -> None:
        if (doubt := self._profile_watch.fold(record.event)) is not None:
            self._loop.post(Noted(doubt))
            self._spawn(asyncio.to_thread(mark_stale, cache_folder(os.environ), doubt))

    async def _written(self) -> None:
        """Return once all that was recorded so far is in the log."""
        if self._writer is not None:
            await self._writer.written()


def find(job: str) -> Any:
    """Return the controller of `job`, or None."""
    try:
        return ray.get_actor(job, namespace=NAMESPACE)
    except ValueError:
        return None
