"""A job's events folded into what a report shows: the steps that count, checkpoints, warnings, the outcome.

Reads event values only; knows neither files nor pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from orchestrator.controller.drains import noticed_text
from orchestrator.controller.faults import injected_text
from orchestrator.events.types import (
    Event,
    Failed,
    Finished,
    Formed,
    FreezeSolved,
    Issued,
    Migrated,
    Noticed,
    RankFailed,
    RankStarted,
    Record,
    Requested,
    Skipped,
    Submitted,
    Warned,
)
from orchestrator.history.curvature_record import CurvatureRecord
from orchestrator.history.freeze_history import began_at
from orchestrator.history.freeze_record import FreezeRecord
from orchestrator.history.phase_bands import phase_bands, phases_of
from orchestrator.history.recovery_history import RecoveryHistory
from orchestrator.pictures.charts import Band
from planner.freezing import Phase
from planner.plan import Plan
from planner.search.alternatives import Alternative
from workers.protocol import (
    CheckpointReport,
    CurvatureReport,
    FaultReport,
    FreezeReport,
    FreezeStarted,
    FrozenCounts,
    SampleReport,
    StepReport,
    TimelineReport,
    ValidationReport,
    WarningReport,
)

Level = Literal["note", "warning", "error"]
RECENT_TIMELINES = 20
"""Of so many of the newest measured steps the timelines are kept, and those of the monitoring phase."""

MONITORING = (Phase.UPPER, Phase.LOWER)


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
    alternatives: tuple[Alternative, ...] = ()
    """What the plan was chosen from."""
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
    measured: dict[int, dict[int, TimelineReport]] = field(default_factory=dict)
    """Step -> rank -> timeline, of the monitoring phase and of the newest measured steps."""
    freeze: FreezeRecord = field(default_factory=FreezeRecord)
    curvature: CurvatureRecord = field(default_factory=CurvatureRecord)
    recovery: RecoveryHistory = field(default_factory=RecoveryHistory)
    """Generations and what lies between them."""
    moves: list[Migrated] = field(default_factory=list)
    sample: SampleReport | None = None
    notes: list[Note] = field(default_factory=list)
    outcome: Finished | Failed | None = None
    """None while the job runs, or if it was killed."""

    @property
    def emulated(self) -> bool:
        """Whether times and rates come from modelled layer times."""
        return self.spec.get("cluster", {}).get("device") == "emulated"

    @property
    def timelines(self) -> dict[int, TimelineReport]:
        """By rank; all of one step, the newest that was measured."""
        return self.measured[max(self.measured)] if self.measured else {}

    @property
    def phases(self) -> tuple[Band, ...]:
        """The freezing phases that the job's steps went through; none where nothing is ever frozen."""
        return phase_bands(self.spec.get("freeze", {}), max(self.steps, default=0))

    def take(self, record: Record) -> None:
        """Fold one more event in."""
        self.ended_s = record.time_s
        self.recovery.take(record)
        match record.event:
            case Submitted() as submitted:
                self._start(submitted, record.time_s)
            case Issued(plan=plan, alternatives=alternatives):
                self.plan, self.alternatives = plan, alternatives
            case RankStarted(node=node):
                self.nodes.add(node)
            case Formed() as formed:
                self._void_after(began_at(formed))
            case Finished() | Failed() as outcome:
                self.outcome = outcome
            case Migrated() as moved:
                self.moves.append(moved)
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
            case FreezeSolved() | FreezeStarted() | FreezeReport() | FrozenCounts() as frozen:
                self.freeze.take(frozen)
            case CurvatureReport() as part:
                self.curvature.take(part, self.plan.pipeline_ranks if self.plan else 1)
        note = _note(record.event)
        if note is not None:
            self.notes.append(note)

    def _start(self, submitted: Submitted, time_s: float) -> None:
        if submitted.takeover:
            return
        self.job, self.spec = submitted.job, submitted.spec
        self.runs += 1
        self.started_s, self.first_step_s, self.outcome = time_s, None, None
        self.nodes.clear()

    def _void_after(self, step: int) -> None:
        """Forget what came after `step`: the job goes on from there, and its later steps are run again."""
        self.steps = {number: report for number, report in self.steps.items() if number <= step}
        self.validations = {number: report for number, report in self.validations.items() if number <= step}
        self.measured = {number: ranks for number, ranks in self.measured.items() if number <= step}
        self.freeze.void_after(step)
        self.curvature.void_after(step)
        if self.sample is not None and self.sample.step > step:
            self.sample = None

    def _add_timeline(self, timeline: TimelineReport) -> None:
        self.measured.setdefault(timeline.step, {})[timeline.rank] = timeline
        phases = phases_of(self.spec.get("freeze", {}))
        recent = [n for n in self.measured if phases is None or phases.of(n) not in MONITORING]
        if len(recent) > RECENT_TIMELINES:
            del self.measured[min(recent)]


def _note(event: Event) -> Note | None:
    """What a person must know of `event`, if anything."""
    match event:
        case Submitted(takeover=True, epoch=epoch):
            return Note("warning", f"The controller was lost; another one took over, as epoch {epoch}.")
        case Submitted(resume=True):
            return Note("note", "The job was resumed.")
        case Requested(request=request):
            return Note("note", f"Someone asked the job to {request}.")
        case Skipped(damage=damage):
            text = f"A damaged checkpoint was passed over: {damage.path}, {damage.file}: {damage.problem}."
            return Note("warning", text)
        case CheckpointReport(step=step, error=str(error)):
            return Note("warning", f"The checkpoint of step {step} failed, the ones before it stay: {error}")
        case FreezeSolved(measured_unfrozen_s=None):
            text = "The freeze ratios rest on the profile's times: the monitored steps did not time every action."
            return Note("note", text)
        case Noticed():
            return Note("note", f"Word came: {noticed_text(event)}.")
        case Warned(text=text):
            return Note("warning", text)
        case FaultReport():
            return Note("note", f"{injected_text(event).capitalize()}.")
        case WarningReport(rank=rank, text=text):
            return Note("warning", f"Rank {rank}: {text}")
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
