"""The job's event loop: passes stimuli to the lifecycle one by one, logs, and has its effects carried out.

Knows no cluster and no file: executor and log are arguments. Runs on one asyncio loop; only `Wait` and `AwaitRanks`
sleep.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from orchestrator.events import types as events
from orchestrator.lifecycle.effects import (
    AppendToLog,
    Assess,
    AwaitCopies,
    AwaitRanks,
    Dismiss,
    Effect,
    LogRegroup,
    Prepare,
    Recruit,
    Release,
    Reserve,
    Wait,
)
from orchestrator.lifecycle.machine import handle
from orchestrator.lifecycle.states import (
    Assessing,
    FinishingCommit,
    Hosting,
    JobFailed,
    JobFinished,
    Joining,
    Loading,
    Order,
    Pending,
    Planning,
    State,
    Stopping,
    Training,
)
from orchestrator.lifecycle.stimuli import (
    CopiesOverdue,
    RankLost,
    RanksOverdue,
    Released,
    Start,
    Stimulus,
    WaitOver,
)

KEPT_HISTORY = 200
"""Number of newest stimuli that the error for an illegal transition shows."""

Work = Coroutine[Any, Any, None]

_PARTS: dict[type[State], str] = {
    Assessing: "detect_s",
    FinishingCommit: "settle_s",
    Planning: "plan_s",
    Loading: "move_s",
    Hosting: "resume_s",
    Joining: "resume_s",
}
"""The part of a regroup's duration that the time in each state counts towards."""


class Executor(Protocol):
    """Carries effects out; answers come back to the event loop as stimuli."""

    def carry_out(self, effect: Effect) -> Work | None:
        """Return the work that `effect` takes; None: it is done."""
        ...

    async def release(self) -> None:
        """End all ranks; safe at any point, and more than once."""
        ...


class EventLoop:
    """The life of one job.

    Args:
        log: takes an event.
        written: returns once all events so far are written: a rank gets no order before the events that it
            depends on are.
    """

    def __init__(
        self,
        order: Order,
        log: Callable[[events.Event], None],
        written: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self._order = order
        self._log = log
        self._written = written
        self.state: State = Pending()
        self._history: deque[Stimulus] = deque(maxlen=KEPT_HISTORY)
        self._stimuli: asyncio.Queue[Stimulus | Exception | asyncio.Future[None]] = asyncio.Queue()
        """An exception is a bug of ours in background work; a future resolves once all before it is done."""
        self._tasks: set[asyncio.Task[None]] = set()
        """All background work."""
        self._attempt: set[asyncio.Task[None]] = set()
        """Background work that the next assessment cancels."""
        self._entered_s = time.monotonic()
        self._spent_s: dict[str, float] = {}
        self._left_s = self._entered_s
        """When the last generation that trained ended."""
        self._stood_s: dict[int, float] = {}
        """Lost rank -> since when it had stood still."""
        # First in the queue, before reports from ranks of an earlier controller.
        self.post(Start())

    def post(self, stimulus: Stimulus) -> None:
        """Queue a stimulus; call it on the event loop's thread."""
        self._stimuli.put_nowait(stimulus)

    async def post_and_wait(self, stimulus: Stimulus) -> None:
        """Queue a stimulus and return once it is handled and what it causes is logged."""
        self.post(stimulus)
        if not isinstance(self.state, JobFinished | JobFailed):
            handled = asyncio.get_running_loop().create_future()
            self._stimuli.put_nowait(handled)
            await handled

    async def run(self, executor: Executor) -> None:
        """Until the job has ended: take a stimulus, ask the lifecycle, carry out its effects."""
        while not isinstance(self.state, JobFinished | JobFailed):
            stimulus = await self._stimuli.get()
            if isinstance(stimulus, asyncio.Future):
                if not stimulus.done():  # the waiter may be gone
                    stimulus.set_result(None)
                continue
            try:
                if isinstance(stimulus, Exception):
                    raise stimulus
                state, effects = handle(self._order, self.state, stimulus, tuple(self._history))
                self._history.append(stimulus)
                if isinstance(stimulus, RankLost) and stimulus.silent_s:
                    self._stood_s[stimulus.rank] = time.monotonic() - stimulus.silent_s
                self._enter(state)
                await self._carry_out_all(effects, executor)
            except Exception as error:  # a bug of ours: the job must not hang, nor leave anything behind
                await self._give_up(error, executor)

    def spawn(self, work: Work) -> asyncio.Task[None]:
        """Run `work` in the background until the job ends; if it fails, so does the job."""
        task = asyncio.get_running_loop().create_task(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # A task that is cancelled before its first turn never awaits it.
        task.add_done_callback(lambda _: work.close())
        return task

    async def close(self) -> None:
        """Cancel what still runs, and release whoever waits for a stimulus that will not be handled any more."""
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while not self._stimuli.empty():
            left = self._stimuli.get_nowait()
            if isinstance(left, asyncio.Future) and not left.done():
                left.set_result(None)

    async def _carry_out_all(self, effects: Sequence[Effect], executor: Executor) -> None:
        logged = False
        for effect in effects:
            if isinstance(effect, AppendToLog | LogRegroup):
                logged = True
            elif logged and self._written is not None:
                await self._written()
                logged = False
            self._carry_out(effect, executor)

    def _carry_out(self, effect: Effect, executor: Executor) -> None:
        match effect:
            case AppendToLog(event):
                self._log(event)
            case LogRegroup(event):
                stood_s = [self._stood_s.pop(rank) for rank in event.lost if rank in self._stood_s]
                silent_s = max(0.0, self._left_s - min(stood_s, default=self._left_s))
                spent_s = {**self._spent_s, "detect_s": self._spent_s.get("detect_s", 0.0) + silent_s}
                self._log(replace(event, **spent_s, silent_s=silent_s))
            case Wait(seconds, pause):
                self.spawn(self._wait(seconds, WaitOver(pause)))
            case AwaitRanks(seconds, id):
                self.spawn(self._wait(seconds, RanksOverdue(id)))
            case AwaitCopies(seconds, ranks, change):
                self.spawn(self._wait(seconds, CopiesOverdue(ranks, change)))
            case Release():
                for task in self._tasks:
                    task.cancel()
                self._spawn_release(executor)
            case _:
                if isinstance(effect, Assess):
                    for task in self._attempt:
                        task.cancel()
                    self._attempt.clear()
                work = executor.carry_out(effect)
                if work is None:
                    return
                task = self.spawn(work)
                if not isinstance(effect, Reserve | Prepare | Recruit | Dismiss):
                    self._attempt.add(task)
                    task.add_done_callback(self._attempt.discard)

    def _enter(self, state: State) -> None:
        """Enter `state`, and add up the times that the states of a regroup take."""
        now_s = time.monotonic()
        part = _PARTS.get(type(self.state))
        if isinstance(self.state, Training | Stopping) and not isinstance(state, Training | Stopping):
            self._spent_s = dict.fromkeys(_PARTS.values(), 0.0)
            self._left_s = now_s
        elif part is not None:
            self._spent_s[part] = self._spent_s.get(part, 0.0) + now_s - self._entered_s
        self._entered_s = now_s
        self.state = state

    async def _wait(self, seconds: float, then: Stimulus) -> None:
        await asyncio.sleep(seconds)
        self.post(then)

    def _spawn_release(self, executor: Executor) -> None:
        async def release() -> None:
            await executor.release()
            self.post(Released())

        self.spawn(release())

    async def _guarded(self, work: Work) -> None:
        try:
            await work
        except Exception as error:
            self._stimuli.put_nowait(error)

    async def _give_up(self, error: Exception, executor: Executor) -> None:
        """End the job because its controller itself failed."""
        # What fails now must not hide `error`, nor leave the driver waiting for an end.
        with suppress(Exception):
            await executor.release()
        reason = f"the controller failed: {type(error).__name__}: {error}"
        self.state = JobFailed(reason, user_error=False)
        self._log(events.Failed(reason=reason, user_error=False))
