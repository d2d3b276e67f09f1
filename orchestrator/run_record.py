"""A job's events folded into what a report shows: the steps that count, checkpoints, warnings, the outcome.

Reads event values only; knows neither files nor pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from orchestrator.events import (
    Event,
    Failed,
    Finished,
    Formed,
    Issued,
    RankFailed,
    RankStarted,
    Record,
    Requested,
    Skipped,
    Submitted,
)
from planner.plan import Plan
from workers.protocol import CheckpointReport, SampleReport, StepReport, TimelineReport, ValidationReport

Level = Literal["note", "warning", "error"]


@dataclass(frozen=True)
class Note:
    """A line for people."""

    level: Level
    text: str


@dataclass
class RunRecord:
    """What happened to a job, over all its runs."""

    job: str = ""
    spec: dict[str, Any] = field(default_factory=dict)
    """The resolved spec of the newest run."""
    plan: Plan | None = None
    runs: int = 0
    """How often the job was submitted: once, and once per resume."""
    started_s: float = 0.0
    """Of the newest run; seconds since the Unix epoch, like the next two."""
    first_step_s: float | None = None
    """When the newest run's first step was reported."""
    ended_s: float = 0.0
    """When the last event was written."""
    nodes: set[str] = field(default_factory=set)
    """Where the ranks of the newest run live."""
    steps: dict[int, StepReport] = field(default_factory=dict)
    """The steps that led to the newest weights, by number: a resume voids those after its checkpoint."""
    validations: dict[int, ValidationReport] = field(default_factory=dict)
    checkpoints: list[CheckpointReport] = field(default_factory=list)
    timelines: dict[int, TimelineReport] = field(default_factory=dict)
    """By rank; all of one step, the newest that was measured."""
    sample: SampleReport | None = None
    notes: list[Note] = field(default_factory=list)
    outcome: Finished | Failed | None = None
    """None while the job runs, or if it was killed."""

    @property
    def emulated(self) -> bool:
        """Whether times and rates come from modelled layer times."""
        return self.spec.get("cluster", {}).get("device") == "emulated"

    def take(self, record: Record) -> None:
        """Fold one more event in."""
        self.ended_s = record.time_s
        match record.event:
            case Submitted() as submitted:
                self._start(submitted, record.time_s)
            case Issued(plan=plan):
                self.plan = plan
            case RankStarted(node=node):
                self.nodes.add(node)
            case Formed(start=start):
                self._void_after(start.step if start else 0)
            case Finished() | Failed() as outcome:
                self.outcome = outcome
            case StepReport() as step:
                self.steps[step.step] = step
                if self.first_step_s is None:
                    self.first_step_s = record.time_s
            case ValidationReport() as validation:
                self.validations[validation.step] = validation
            case TimelineReport() as timeline:
                self._add_timeline(timeline)
            case SampleReport() as sample:
                self.sample = sample
            case CheckpointReport() as checkpoint:
                self.checkpoints.append(checkpoint)
        note = _note(record.event)
        if note is not None:
            self.notes.append(note)

    def _start(self, submitted: Submitted, time_s: float) -> None:
        self.job, self.spec = submitted.job, submitted.spec
        self.runs += 1
        self.started_s, self.first_step_s, self.outcome = time_s, None, None
        self.nodes.clear()

    def _void_after(self, step: int) -> None:
        """Forget what came after `step`: the job goes on from there, and its later steps are run again."""
        self.steps = {number: report for number, report in self.steps.items() if number <= step}
        self.validations = {number: report for number, report in self.validations.items() if number <= step}
        self.timelines = {rank: report for rank, report in self.timelines.items() if report.step <= step}
        if self.sample is not None and self.sample.step > step:
            self.sample = None

    def _add_timeline(self, timeline: TimelineReport) -> None:
        newest = max((report.step for report in self.timelines.values()), default=timeline.step)
        if timeline.step > newest:
            self.timelines.clear()
        if timeline.step >= newest:
            self.timelines[timeline.rank] = timeline


def _note(event: Event) -> Note | None:
    """What a person must know of `event`, if anything."""
    match event:
        case Submitted(resume=True):
            return Note("note", "The job was resumed.")
        case Requested(request=request):
            return Note("note", f"Someone asked the job to {request}.")
        case Skipped(damage=damage):
            text = f"A damaged checkpoint was passed over: {damage.path}, {damage.file}: {damage.problem}."
            return Note("warning", text)
        case CheckpointReport(step=step, error=str(error)):
            return Note("warning", f"The checkpoint of step {step} failed, the ones before it stay: {error}")
        case RankFailed(rank=rank, error=error):
            return Note("error", f"Rank {rank} failed: {error}")
        case Failed(reason=reason):
            return Note("error", f"The job failed: {reason}")
    return None


def fold(records: Iterable[Record]) -> RunRecord:
    """The run that `records`, oldest first, tell of."""
    run = RunRecord()
    for record in records:
        run.take(record)
    return run
