"""The log of a run in which everything happens that a metric counts: freezing, copies, a loss, a return to a
checkpoint, a move."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from synthetic_run import RANKS, START_S, freezing_records, plan, step_report, timelines

from orchestrator.events import types as events
from orchestrator.events.types import Event, Record
from workers.protocol.orders import CheckpointRef, Generation
from workers.protocol.reports import CheckpointReport, StandbyReport, SwitchReport, ValidationReport

STEPS = 60
"""Steps until a rank is lost."""
CHECKPOINT = 50
"""The step that the job goes back to."""
LAST = 70
TRAIN_SAMPLES = 1_000
FLOPS_PER_SAMPLE = 2e9
MACHINE = "NVIDIA H200, PyTorch 2.9.0"
PARTS = {"detect_s": 0.5, "settle_s": 0.25, "plan_s": 0.125, "move_s": 2.0, "resume_s": 1.0}
COPIED = replace(
    plan(),
    version=2,
    standbys=tuple(((place + 1) % RANKS,) for place in range(RANKS) for _ in plan().layers_of_place(place)),
    predicted_step_s=0.12,
)
"""Every layer has a copy on the rank after its owner."""


def standbys(place: int, step: int) -> StandbyReport:
    return StandbyReport(step=step, rank=place, layers=COPIED.standbys_of(place), bytes=1, seconds=0.1)


def regrouped(cause: str = "loss", *, step: int, generation: int = 2) -> events.Regrouped:
    return events.Regrouped(
        generation=generation,
        cause=cause,
        reason="rank 2 was killed",
        lost=(2,),
        joined=(4,),
        step=step,
        rerun=1,
        steps_lost=STEPS - step,
        **PARTS,
    )


def migrated(step: int) -> events.Migrated:
    return events.Migrated(
        version=3,
        layers=(3,),
        source=(1,),
        target=(0,),
        mode="live",
        bytes=4096,
        seconds=1.5,
        steps=2,
        stall_s=0.01,
        step=step,
    )


def switched(place: int, step: int, time_s: float) -> SwitchReport:
    return SwitchReport(
        step=step,
        rank=place,
        epoch=1,
        version=3,
        taken=(3,) if place == 0 else (),
        given=(3,) if place == 1 else (),
        brought_bytes=4096,
        brought_s=0.5,
        stall_s=0.25,
        switched_s=time_s,
    )


class Run:
    """A log that is being written; `clock_s` is the time of the newest event."""

    def __init__(self) -> None:
        self.records = [record for record in freezing_records(steps=STEPS) if _kept(record.event)]
        self._random = Random(7)
        self.clock_s = START_S
        for index, record in enumerate(self.records):
            if isinstance(record.event, events.Submitted):
                given = record.event.spec
                job = {**given["job"], "stop_at": "perplexity <= 7"}
                spec = {**given, "job": job, "elastic": {"redundancy": "peer"}}
                submitted = replace(record.event, spec=spec, train_samples=TRAIN_SAMPLES)
                self.records[index] = replace(record, event=submitted)
            elif isinstance(record.event, events.RankStarted):
                self.records[index] = replace(record, event=replace(record.event, machine=MACHINE))
        counted = events.FlopsCounted(flops_per_sample=FLOPS_PER_SAMPLE)
        self.records.insert(1, Record(time_s=self.records[0].time_s, event=counted))
        self.records = [_timed(record) for record in self.records]
        self.clock_s = self.records[-1].time_s

    def put(self, *logged: Event) -> None:
        self.records += [Record(time_s=self.clock_s, event=event) for event in logged]

    def train(self, first: int, last: int, generation: int) -> None:
        for step in range(first, last + 1):
            report = replace(step_report(step, self._random), generation=generation)
            self.clock_s += report.step_s
            self.put(replace(report, committed_s=self.clock_s))

    def measure(self, step: int, *, slow: int | None = None) -> None:
        """Every rank reports its timeline; rank `slow` took twice as long."""
        for report in timelines(step, self._random):
            factor = 2.0 if report.rank == slow else 1.0
            spans = tuple(
                replace(span, end_s=span.start_s + factor * (span.end_s - span.start_s))
                for span in report.spans
            )
            self.put(replace(report, spans=spans, memory_bytes=2**20 * (report.rank + 1)))


def _kept(event: Event) -> bool:
    return not isinstance(event, events.Finished)


def _timed(record: Record) -> Record:
    if hasattr(record.event, "committed_s"):
        return replace(record, event=replace(record.event, committed_s=record.time_s))  # type: ignore[call-arg]
    return record


def eventful() -> Run:
    """The whole run; at its end rank 3 computes at half its speed."""
    run = Run()
    run.put(CheckpointReport(step=CHECKPOINT, path="c", bytes=1, seconds=0.1))
    run.clock_s += sum(PARTS.values())
    generation = Generation(
        number=2, epoch=1, members=(0, 1, 4, 3), store_host="h", store_port=1, timeout_s=1.0
    )
    run.put(
        events.Issued(plan=COPIED),
        events.RankStarted(rank=4, node="5f0c", host="10.0.0.4", pid=4004, machine=MACHINE),
        events.Formed(generation=generation, start=CheckpointRef(path="c", step=CHECKPOINT), step=CHECKPOINT),
        regrouped(step=CHECKPOINT),
    )
    run.train(CHECKPOINT + 1, LAST, generation=2)
    run.put(
        ValidationReport(step=LAST, loss=1.9, metrics={"perplexity": 6.69}),
        *(standbys(place, LAST) for place in range(RANKS)),
    )
    run.clock_s += 1.5
    run.put(migrated(LAST))
    run.measure(LAST - 1)
    run.measure(LAST, slow=3)
    return run
