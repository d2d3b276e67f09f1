"""Rows of a table of faults, fired one after the other in one running job of plain processes, and their
outcomes.

A row is armed once the job has recovered from the one before; nothing here waits for a fixed time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from process_hosts import Ran
from resting import Resting

from orchestrator.events import types as events
from orchestrator.lifecycle.stimuli import SaveOrStop
from workers.fault_injection.fault import Fault
from workers.fault_injection.kinds import FaultKind, FaultPhase
from workers.protocol.orders import Request
from workers.protocol.reports import FaultReport, StepReport

PATIENCE_STEPS = 3000
"""A row that has not fired after this many steps never will."""
STOPPED_S = 60.0
"""How long a stopped process would stay stopped; the controller finds and kills it long before."""


@dataclass(frozen=True)
class Row:
    """One fault of the table."""

    phase: FaultPhase
    where: str
    """`first`, `middle` or `last` of the ranks."""
    kind: FaultKind

    def place(self, ranks: int) -> int:
        return {"first": 0, "middle": ranks // 2, "last": ranks - 1}[self.where]

    @property
    def fault(self) -> Fault:
        seconds = STOPPED_S if self.kind is FaultKind.STOP else None
        return Fault(kind=self.kind, phase=self.phase, seconds=seconds)

    def __str__(self) -> str:
        return f"{self.kind}-{self.phase}-{self.where}"


@dataclass
class Told:
    """What was received while a row was the newest."""

    rank: int
    """The rank in which the fault fires."""
    members: tuple[int, ...]
    """The members by place when the row was armed."""
    step: int
    """The newest step at that time."""
    checkpoint: int
    """The step of the newest complete checkpoint at that time."""
    lost: int | None = None
    """The rank that has to fail first for the row's fault to fire."""
    ends: bool = True
    """Whether the fault ends the generation."""
    log: list[events.Event] = field(default_factory=list)

    @property
    def fired(self) -> FaultReport | None:
        """The report of the row's own fault, leaving out faults that only led to it."""
        fired = [e for e in self.log if isinstance(e, FaultReport) and e.phase and e.rank == self.rank]
        return fired[0] if fired else None

    @property
    def failed(self) -> list[int]:
        return [event.rank for event in self.log if isinstance(event, events.RankFailed)]

    @property
    def regrouped(self) -> list[events.Regrouped]:
        return [event for event in self.log if isinstance(event, events.Regrouped)]


class Running(Protocol):
    """A job that trains."""

    def call_in_turn(self, *calls: tuple[int, str, Any]) -> None:
        """Call ranks in turn, each after the one before has answered, without waiting for the calls."""
        ...

    def post(self, stimulus: SaveOrStop) -> None: ...


class Table:
    """Fires the faults of `rows` in a job, then stops the job. Pass it as `act` to `ElasticJob`.

    Args:
        resting: decides when the job is ready for the next row.
    """

    def __init__(self, rows: Sequence[Row], resting: Resting) -> None:
        self._rows = list(rows)
        self.job = resting
        self.told: dict[Row, Told] = {}
        self._now: Told | None = None
        self._over = False

    def __call__(self, running: Running, event: events.Event) -> None:
        self.job.see(event)
        if self._now is not None:
            self._now.log.append(event)
        hopeless = self._hopeless()
        if self._over or not (hopeless or (self._done() and self._ready())):
            return
        if hopeless or not self._rows:
            self._over = True
            self._end(running)
        else:
            self._arm(running, self._rows.pop(0))

    def _ready(self) -> bool:
        """Whether the job is at rest and has a spare for each place that becomes free."""
        migrates = bool(self._rows) and self._rows[0].phase is FaultPhase.MIGRATING
        return self.job.at_rest and len(self.job.up) - len(self.job.members) >= (2 if migrates else 1)

    def _end(self, running: Running) -> None:
        running.post(SaveOrStop(Request.STOP))

    def _done(self) -> bool:
        """Whether the newest row's fault has fired and the job has since formed a new generation."""
        now = self._now
        return now is None or (now.fired is not None and (bool(now.regrouped) or not now.ends))

    def _hopeless(self) -> bool:
        now = self._now
        return now is not None and now.fired is None and self.job.step > now.step + PATIENCE_STEPS

    def _arm(self, running: Running, row: Row) -> None:
        members = self.job.members
        rank = members[row.place(len(members))]
        if row.phase is FaultPhase.MIGRATING:
            self._migrate(running, row, rank)
            return
        # The job needs something to recover from.
        after = ((rank, Fault(kind=FaultKind.DROP_LINK)),) if row.phase is FaultPhase.RECOVERING else ()
        self._inject(running, row, Told(rank, members, self.job.step, self.job.saved), *after)

    def _migrate(self, running: Running, row: Row, rank: int) -> None:
        """Make layers move to the place of `rank`, that is, to the rank that replaces it."""
        members = self.job.members
        comes = min(self.job.up - set(members))
        told = Told(comes, members, self.job.step, self.job.saved, lost=rank)
        self._inject(running, row, told, (rank, Fault(kind=FaultKind.KILL)))

    def _inject(self, running: Running, row: Row, told: Told, *after: tuple[int, Fault]) -> None:
        """Arm the row, then the faults that lead the job there."""
        self._now = self.told[row] = told
        faults = ((told.rank, row.fault), *after)
        running.call_in_turn(*((rank, "arm", fault) for rank, fault in faults))


def assert_consistent(ran: Ran) -> None:
    """Check that reports of the same step agree: a step that runs again sees the same data and loss."""
    seen: dict[int, tuple[float, str]] = {}
    for report in ran.of(StepReport):
        found = (report.loss, report.samples_digest)
        assert seen.setdefault(report.step, found) == found, report
