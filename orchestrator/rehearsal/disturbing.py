"""Slows down one rank of a running job, again and again: by a neighbour on its core, or by an injected fault.

The follower of the job passes its events in. Knows no Ray.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from orchestrator.events.rehearsed import Disturbed, DisturbedSteps
from orchestrator.events.types import Failed, Finished, Record
from planner.wording import counted
from workers.fault_injection.fault import Fault
from workers.fault_injection.kinds import FaultKind
from workers.protocol.errors import JobError
from workers.protocol.reports import FaultReport, StepReport

FACTORS = {"light": 4 / 3, "heavy": 3.0}
"""Level -> what a neighbour of that level on its core makes of a rank's times: `workers.interference.neighbours`."""
LEAST_STEPS = 10
"""Steps of a visit: fewer are over before the layers have moved."""
VISITS = 2
"""Default number of the neighbour's visits."""


@dataclass(frozen=True, kw_only=True)
class Interference:
    """Disturbance planned for a job."""

    level: str
    """`light` or `heavy`."""
    kind: str
    """Kind of a real neighbour: see `workers.interference.neighbours`."""
    rank: int
    """The number of the rank to disturb."""
    visits: tuple[DisturbedSteps, ...]


def visits_of(steps: int, every: int | None) -> tuple[DisturbedSteps, ...]:
    """When a neighbour of a job of `steps` steps is there: it is away for `every` steps and there for as many, in turn.

    Args:
        every: None: so many that it comes `VISITS` times and is away at the end.

    Raises:
        JobError: it would be there too briefly, or never.
    """
    most = steps
    if every is None:
        most, every = VISITS, steps // (2 * VISITS + 1)
        if every < LEAST_STEPS:
            least = LEAST_STEPS * (2 * VISITS + 1)
            raise JobError(
                f"job.steps = {steps}: too few for a neighbour that comes and goes {VISITS} times; set at least"
                f" {least}, or say how long it stays with --every"
            )
    if every < LEAST_STEPS:
        raise JobError(f"--every {every}: a visit lasts at least {LEAST_STEPS} steps")
    found = tuple(
        DisturbedSteps(first=first, last=min(first + every - 1, steps))
        for first in range(every + 1, steps + 1, 2 * every)
    )[:most]
    if not found:
        raise JobError(
            f"--every {every}: the job has {counted(steps, 'step')}, and the neighbour would never come; set it below"
            f" {steps}, or more steps with --set job.steps={2 * every}"
        )
    return found


class Disturber(Protocol):
    """Disturbs a job while it runs."""

    trouble: str
    """Why it did not disturb it as asked; empty: it did."""

    def observe(self, record: Record) -> None:
        """Take an event of the job in; returns at once."""
        ...

    def close(self) -> None:
        """Disturb no further; nothing is left of it."""
        ...

    def disturbed(self) -> Disturbed:
        """Record of the disturbance."""
        ...


class ComingNeighbour:
    """A process beside the rank that comes and goes.

    Args:
        come: starts it; the context's end ends it.
        words: what comes, such as `a heavy neighbour (compute) on core 1`.
        say: takes what happens, in words.
    """

    def __init__(
        self,
        plan: Interference,
        come: Callable[[], AbstractContextManager[None]],
        words: str,
        say: Callable[[str], None],
    ) -> None:
        self.trouble = ""
        self._plan = plan
        self._come = come
        self._words = words
        self._say = say
        self._visits: list[DisturbedSteps] = []
        self._step = 0
        self._over = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._play, daemon=True)
        self._thread.start()

    def observe(self, record: Record) -> None:
        with self._changed:
            match record.event:
                case StepReport(step=step):
                    self._step = step
                case Finished() | Failed():
                    self._over = True
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._thread.join()

    def disturbed(self) -> Disturbed:
        return Disturbed(by=self._words, rank=self._plan.rank, visits=tuple(self._visits))

    def _play(self) -> None:
        try:
            for visit in self._plan.visits:
                if not self._reached(visit.first - 1):
                    return
                with self._come():
                    first = self._step + 1
                    self._say(f"{self._words} comes in step {first}")
                    on = self._reached(visit.last)
                last = self._step + on  # the step under way was disturbed too
                if last >= first:
                    self._visits.append(DisturbedSteps(first=first, last=last))
                if not on:
                    return
                self._say(f"it goes in step {last}")
        except (OSError, RuntimeError) as error:
            self.trouble = str(error)
            self._say(f"the neighbour did not come: {error}")

    def _reached(self, step: int) -> bool:
        """Wait until `step` is committed; whether it was before the job's end."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._step >= step)
            return not self._over


class TimeLimit:
    """Stops a job that is not through in time.

    Args:
        limit_s: from the job's first step on.
        stop: stops the job after the step in flight; may block.
        say: takes what happens, in words.
    """

    def __init__(self, limit_s: float, stop: Callable[[], object], say: Callable[[str], None]) -> None:
        self.over = False
        """Whether the time was over before the job's end."""
        self._limit_s = limit_s
        self._stop = stop
        self._say = say
        self._step = 0
        self._timer: threading.Timer | None = None

    def observe(self, record: Record) -> None:
        match record.event:
            case StepReport(step=step):
                self._step = step
                if self._timer is None and self._limit_s < threading.TIMEOUT_MAX:
                    self._timer = threading.Timer(self._limit_s, self._end)
                    self._timer.start()
            case Finished() | Failed():
                self.close()
            case _:
                pass

    def close(self) -> None:
        """Wait for nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()

    def _end(self) -> None:
        self._say(f"time is over: the job is stopped at step {self._step}; --minutes sets another limit")
        self.over = True
        try:
            self._stop()
        except JobError as error:  # it has just ended
            self._say(f"the job was not stopped: {error}")


class InjectedSlowdown:
    """A fault that slows the rank down, armed for all visits once the job trains.

    Args:
        arm: arms a fault on the rank of this number.
        say: takes what happens, in words.
    """

    def __init__(
        self, plan: Interference, arm: Callable[[int, Fault], object], say: Callable[[str], None]
    ) -> None:
        self.trouble = ""
        self._plan = plan
        self._arm = arm
        self._say = say
        self._factor = FACTORS[plan.level]
        self._fired: list[int] = []
        self._step = 0
        self._thread = threading.Thread(target=self._arm_all, daemon=True)

    def observe(self, record: Record) -> None:
        match record.event:
            case StepReport(step=step):
                self._step = step
                if self._thread.ident is None:
                    self._thread.start()
            case FaultReport(rank=rank, step=step) if rank == self._plan.rank:
                self._fired.append(step)

    def close(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def disturbed(self) -> Disturbed:
        lengths = [visit.last - visit.first for visit in self._plan.visits]
        visits = tuple(
            DisturbedSteps(first=first, last=min(first + length, self._step))
            for first, length in zip(sorted(self._fired), lengths, strict=False)
            if first <= self._step
        )
        words = f"an injected fault that makes its actions {self._factor:.3g} times as long"
        return Disturbed(by=words, rank=self._plan.rank, visits=visits)

    def _arm_all(self) -> None:
        rank = self._plan.rank
        self._say(
            f"emulated devices: rank {rank} gets {self._factor:.3g} times slower by an injected fault,"
            f" {counted(len(self._plan.visits), 'time')}"
        )
        try:
            for visit in self._plan.visits:
                length = visit.last - visit.first + 1
                fault = Fault(kind=FaultKind.SLOW, factor=self._factor, step=visit.first, steps=length)
                self._arm(rank, fault)
        except JobError as error:
            self.trouble = str(error)
            self._say(f"rank {rank} could not be slowed down: {error}")
