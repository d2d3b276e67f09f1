"""Plays a trace against the nodes of a running job, in a thread: adds, notices and kills at their times.

The clock starts once the job has committed steps on the nodes that the trace begins with. Knows no Ray; the follower of
the job passes its events in.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Protocol

from orchestrator.events.rehearsed import NodeLife, Rehearsed
from orchestrator.events.types import Failed, Finished, Record, Regrouped, Requested
from orchestrator.quantities import seconds
from orchestrator.rehearsal.traces import NodeChangeKind, NodeTrace
from workers.protocol.errors import JobError
from workers.protocol.reports import StepReport

WARM_STEPS = 5
"""Steps before the trace begins: the first of a generation are slower than the rest."""
FITTED = 0.8
"""Share of the job's remaining steps that a trace is fitted to: it trains more slowly on fewer nodes."""
SHRINK_S = 120.0
"""Time limit for the job to train without a node that only its start needed."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """Trace to play, and the settings to play it with."""

    trace: NodeTrace
    source: str
    """Where it came from, in words."""
    speedup: float | None
    """Seconds of the trace per second; None: so many that it is over before the job is."""
    grace_s: float | None
    """Seconds of the trace between notice and end of a node; None: no notice."""
    resources: Mapping[str, float]
    """Resources of each node: those that one rank takes."""
    extra: tuple[str, ...] = ()
    """Nodes that the job starts with and the trace does not: they go before the clock starts."""
    steps: int = 0
    """Steps of the job."""


@dataclass(frozen=True)
class _Act:
    """Something to do at a time."""

    at_s: float
    """Since the beginning of the trace, sped up."""
    what: str
    node: str


class Nodes(Protocol):
    """Nodes that can be made to come and go; see `local_nodes.LocalNodes`."""

    def add(self, name: str, resources: Mapping[str, float]) -> None: ...

    def kill(self, name: str) -> None: ...

    def notice(self, name: str, gone_s: float) -> None: ...

    def lives(self) -> tuple[NodeLife, ...]: ...


class TracePlayer:
    """Plays one script.

    Args:
        stop: asks the job to stop; called when the trace is over, or cannot be played on.
        goes_on: the job trains on to its end after a trace that was played to its own.
        say: takes what happens, in words.
    """

    def __init__(
        self,
        script: Script,
        nodes: Nodes,
        say: Callable[[str], None],
        stop: Callable[[], None],
        *,
        goes_on: bool = False,
    ) -> None:
        self._script = script
        self._nodes = nodes
        self._say = say
        self._stop = stop
        self._goes_on = goes_on
        self.cut_short: str | None = None
        """Why the trace could not be played to its end, in words."""
        self._commits: list[float] = []
        """When the steps of the newest generation were committed."""
        self._last_commit_s: float | None = None
        self._step = 0
        self._regroupings = 0
        self._over = False
        self._changed = threading.Condition()
        self._began_s: float | None = None
        self._ended_s: float | None = None
        self._speedup = script.speedup or 1.0
        self._thread = threading.Thread(target=self._play, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def observe(self, record: Record) -> None:
        """Take an event of the job in."""
        with self._changed:
            match record.event:
                case StepReport(step=step, committed_s=committed_s):
                    self._last_commit_s = committed_s or record.time_s
                    self._commits.append(self._last_commit_s)
                    self._step = step
                case Regrouped():
                    self._commits.clear()
                    self._regroupings += 1
                case Finished():
                    # What comes after the last commit is no training any more.
                    self._finish(self._last_commit_s or record.time_s)
                case Failed() | Requested(request="stop" | "abort"):
                    self._finish(record.time_s)
            self._changed.notify_all()

    def end(self) -> None:
        """Play no further, and wait until nothing is being done."""
        with self._changed:
            self._finish(time.time())
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    def rehearsed(self) -> Rehearsed | None:
        """Record of the replay; None if the clock never started."""
        if self._began_s is None or self._ended_s is None:
            return None
        return Rehearsed(
            trace=self._script.source,
            speedup=self._speedup,
            grace_s=self._script.grace_s,
            began_s=self._began_s,
            ended_s=self._ended_s,
            lives=self._nodes.lives(),
        )

    def _finish(self, time_s: float) -> None:
        self._over = True
        if self._ended_s is None:
            self._ended_s = time_s

    def _play(self) -> None:
        why = "the trace is over"
        try:
            if not self._warm_up() or not self._play_all():
                return
        except (
            Exception
        ) as error:  # whatever Ray raises, too: nothing else reports it, and the job would train on
            self.cut_short = in_words(error)
            why = f"the trace ends early: {self.cut_short}"
        with self._changed:
            self._finish(time.time())
        self._say(why)
        if self.cut_short is not None or not self._goes_on:
            self._stop()

    def _play_all(self) -> bool:
        """Do all that the trace says; whether the job is still there at its end."""
        trace = self._script.trace
        for act in acts(trace, self._speedup, self._script.grace_s):
            if not self._sleep_until(act.at_s):
                return False
            self._do(act)
        return self._sleep_until(trace.end_ms / 1e3 / self._speedup)

    def _warm_up(self) -> bool:
        """Until the job trains on the nodes of the trace's beginning alone; whether it does."""
        if not self._trained():
            return False
        for node in self._script.extra:
            regroupings = self._regroupings
            self._nodes.kill(node)
            with self._changed:
                self._changed.wait_for(lambda: self._over or self._regroupings > regroupings, SHRINK_S)  # noqa: B023
            if not self._trained():
                return False
        with self._changed:
            if self._over:
                return False
            if self._script.speedup is None:
                self._speedup = self._fit()
            self._began_s = time.time()
        length = seconds(self._script.trace.end_ms / 1e3)
        self._say(
            f"the trace begins: {length} and {self._script.trace.losses} losses, {self._speedup:.3g} times as fast"
        )
        return True

    def _trained(self) -> bool:
        """Wait until the newest generation has committed some steps; whether it did before the job's end."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or len(self._commits) >= WARM_STEPS)
            return not self._over

    def _fit(self) -> float:
        """The speed at which the trace is over before the job is."""
        step_s = median(after - before for before, after in pairwise(self._commits))
        remaining_s = max(self._script.steps - self._step, 1) * step_s * FITTED
        return max(1.0, self._script.trace.end_ms / 1e3 / remaining_s)

    def _sleep_until(self, at_s: float) -> bool:
        """Until `at_s` after the beginning; whether the job is still there."""
        assert self._began_s is not None
        with self._changed:
            while not self._over:
                left_s = self._began_s + at_s - time.time()
                if left_s <= 0:
                    return True
                self._changed.wait(left_s)
        return False

    def _do(self, act: _Act) -> None:
        if act.what == NodeChangeKind.ADD:
            self._nodes.add(act.node, self._script.resources)
        elif act.what == NodeChangeKind.REMOVE:
            self._nodes.kill(act.node)
        else:
            assert self._script.grace_s is not None
            self._nodes.notice(act.node, time.time() + self._script.grace_s / self._speedup)
            self._say(f"{act.node} gets notice")
            return
        self._say(f"{act.node} {'comes' if act.what == NodeChangeKind.ADD else 'is gone'}")


def acts(trace: NodeTrace, speedup: float, grace_s: float | None) -> list[_Act]:
    """Acts in order of time; the nodes of the beginning are there already."""
    found: list[_Act] = []
    came_s: dict[str, float] = {}
    for change in trace.changes:
        at_s = change.time_ms / 1e3
        if change.kind is NodeChangeKind.ADD:
            came_s[change.node] = at_s
        if change.time_ms == 0:
            continue
        if change.kind is NodeChangeKind.REMOVE and grace_s is not None:
            # A node that lives shorter than its notice gets it as it comes.
            told_s = max(came_s[change.node], at_s - grace_s)
            found.append(_Act(told_s / speedup, "notice", change.node))
        found.append(_Act(at_s / speedup, change.kind, change.node))
    return sorted(found, key=lambda act: act.at_s)


def in_words(error: Exception) -> str:
    """Text of `error`; errors that are not made for people are named."""
    return str(error) if isinstance(error, JobError) else f"{type(error).__name__}: {error}"
