"""The one fold of a job's event log: the job's state and history, bounded however long it trains.

Controller, takeover, reports and resumed runs read this and fold nothing themselves; only the ledger audits the raw
log. Reads event values; knows neither files nor pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, TypeAdapter

from orchestrator.events.rehearsed import Disturbed
from orchestrator.events.types import (
    Failed,
    Finished,
    FlopsCounted,
    Formed,
    Issued,
    MemoryLimited,
    Migrated,
    OutOfMemory,
    Paused,
    RankStarted,
    Record,
    Requested,
    Scaled,
    Skipped,
    Submitted,
)
from orchestrator.history.adapt_record import AdaptEvent, AdaptRecord
from orchestrator.history.batch_course import course_in
from orchestrator.history.columns import Columns
from orchestrator.history.command_table import CommandTable
from orchestrator.history.curvature_record import CurvatureRecord
from orchestrator.history.freeze_history import FreezeHistory, cut
from orchestrator.history.freeze_record import FreezeEvent, FreezeRecord
from orchestrator.history.frozen_counts import ParameterCounts
from orchestrator.history.memory_record import MemoryRecord
from orchestrator.history.notes import Note, note_of
from orchestrator.history.phase_bands import Band, phase_bands, phases_of
from orchestrator.history.ranks_view import RanksEvent, RanksView
from orchestrator.history.recovery_history import RecoveryHistory
from orchestrator.history.thinning import EVERY, Grid, thin, up_to
from orchestrator.history.totals import Totals
from planner.course import Course, Leg
from planner.freezing import Phase, Phases
from planner.plan import Plan
from planner.search.alternatives import Alternative
from workers.protocol.orders import Request
from workers.protocol.reports import (
    CheckpointReport,
    CurvatureReport,
    Rescued,
    SampleReport,
    StepReport,
    SwitchReport,
    TimelineReport,
    ValidationReport,
)

VERSION = 25
"""Version of a view's contents and of its fold: a snapshot of another version is not read."""
RECENT_TIMELINES = 20
"""Newest measured steps whose timelines are kept, besides those of the monitoring phase."""
KEPT_SPANS = 6_000
"""Most actions in the timelines that are kept; beyond it older steps are dropped: those that were not monitored, and if
there are none, every other monitored one."""
KEPT_DECISIONS = 20
KEPT_LINES = 300
"""Newest notes, checkpoints, moves and requests that are kept, of each."""
MONITORING = (Phase.UPPER, Phase.LOWER)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class IssuedPlan:
    """An issued plan, and the alternatives that it was chosen from."""

    time_s: float
    step: int
    """Steps committed when it was issued."""
    plan: Plan
    alternatives: tuple[Alternative, ...]
    """Including the plan itself; empty if there was no search."""


@dataclass
class JobView:
    """A job, over all its starts."""

    job: str = ""
    state: str = "pending"
    """`starting`, `training`, `waiting` for capacity, `paused` on request, `finished`, `stopped` or `failed`."""
    epoch: int = 0
    """Epoch of the newest controller."""
    spec: dict[str, Any] = field(default_factory=dict)
    """The resolved spec of the newest start."""
    step: int = 0
    """Steps committed."""
    train_samples: int = 0
    """Training samples; 0: unknown."""
    flops_per_sample: float | None = None
    """Floating-point operations of a sample's forward and backward passes; None: unknown."""
    tokens: int = 0
    """Tokens in committed steps; a step that ran twice counts twice. Samples if the model has no tokens."""
    runs: int = 0
    """Number of submissions of the job: one, and one per resume."""
    events: int = 0
    """Events since the newest start, including it."""
    started_s: float = 0.0
    """Time of the newest start; seconds since the Unix epoch, like the next two."""
    first_step_s: float | None = None
    """Time of the first step report of the newest start."""
    last_s: float = 0.0
    """Time of the last event."""
    earlier_s: float = 0.0
    """Seconds that the starts before the newest one lasted, each from its first event to its last."""
    plan: Plan | None = None
    """The newest issued plan."""
    formed: Plan | None = None
    """The plan that the newest generation formed with."""
    followed: Plan | None = None
    """The plan that the ranks follow."""
    decisions: list[IssuedPlan] = field(default_factory=list)
    """The newest plans, each with its reason and alternatives."""
    nodes: set[str] = field(default_factory=set)
    """Nodes of the ranks of the newest start."""
    ranks: RanksView = field(default_factory=RanksView)
    steps: Annotated[dict[int, StepReport], Columns(StepReport)] = field(default_factory=dict)
    """The steps that led to the newest weights, by number; an older entry may stand for its neighbours too."""
    validations: dict[int, ValidationReport] = field(default_factory=dict)
    validated: int = 0
    """The last validated step since the newest start."""
    checkpoints: list[CheckpointReport] = field(default_factory=list)
    measured: dict[int, dict[int, TimelineReport]] = field(default_factory=dict)
    """Step -> rank -> timeline, of the monitoring phase and of the newest measured steps."""
    measured_since: int = 0
    """The step after which the ranks have followed `measured_with`: timelines of later steps belong to it."""
    measured_with: Plan | None = None
    """The newest plan that ranks followed, in this start or an earlier one."""
    freeze: FreezeRecord = field(default_factory=FreezeRecord)
    adapt: AdaptRecord = field(default_factory=AdaptRecord)
    memory: MemoryRecord = field(default_factory=MemoryRecord)
    curvature: CurvatureRecord = field(default_factory=CurvatureRecord)
    recovery: RecoveryHistory = field(default_factory=RecoveryHistory)
    """Generations and the gaps between them."""
    disturbed: Disturbed | None = None
    """Slowdown that a rehearsal imposed on one of the newest start's ranks; None before its end, and for other jobs."""
    totals: Totals = field(default_factory=Totals)
    """Totals of recoveries and moves over the whole log."""
    moves: list[Migrated] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    commands: CommandTable = field(default_factory=CommandTable)
    """Commands from outside since the newest start."""
    resizing: str = ""
    """Id of the newest command for another number of ranks that was checked and logged; empty: there was none, or it
    came to nothing."""
    stopping: bool = False
    """Whether someone has requested a stop since the newest start."""
    pausing: bool = False
    """Whether someone has requested a pause and the job has not paused yet."""
    sample: SampleReport | None = None
    notes: list[Note] = field(default_factory=list)
    rescued: int = 0
    """Step of the newest checkpoint that ranks wrote because the cluster's head was lost, since the newest start; 0:
    none."""
    outcome: Finished | Failed | None = None
    """None while the job runs, or if it was killed."""
    trouble: str = ""
    """Why the job has no controller, in words. Not from the log: the controller or the client sets it."""
    pid: int | None = None
    """Process id of the controller; not from the log either."""

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        """The alternatives that the plan was chosen from."""
        return self.decisions[-1].alternatives if self.decisions else ()

    @property
    def last_step(self) -> int:
        """The step at which the job is done."""
        steps = self.spec.get("job", {}).get("steps", 0)
        return steps if self.course is None else self.course.last_step(steps)

    @property
    def legs(self) -> tuple[Leg, ...]:
        """The legs of the batch's course after the one that the spec says."""
        return tuple(
            prefix.leg for _, prefix in sorted(self.freeze.prefixes.items()) if prefix.leg is not None
        )

    @property
    def course(self) -> Course | None:
        """The course of the job's batch; None before a spec with one is known."""
        return course_in(self.spec, self.legs)

    @property
    def folder(self) -> str:
        """The job's folder."""
        return self.spec.get("job", {}).get("output") or ""

    @property
    def duration_s(self) -> float:
        """Seconds that all starts have lasted, without the time between them."""
        return self.earlier_s + self.last_s - self.started_s

    @property
    def steps_rerun(self) -> int:
        """Steps that were run again, over the whole log: interrupted ones, and those that a return to a checkpoint
        voided."""
        return self.totals.interrupted + self.recovery.undone

    @property
    def emulated(self) -> bool:
        """Whether times and rates come from modelled layer times."""
        return self.spec.get("cluster", {}).get("device") == "emulated"

    @property
    def timelines(self) -> dict[int, TimelineReport]:
        """Rank -> timeline of the newest measured step."""
        return self.measured[max(self.measured)] if self.measured else {}

    def as_measured(self, step: int) -> JobView:
        """The job as if `step` were its newest measured step: no later one was measured.

        It has no plan if the ranks have switched to a plan with another partition since then.

        Raises:
            KeyError: `step` was not measured, or is no longer kept.
        """
        if step not in self.measured:
            raise KeyError(step)
        return replace(
            self,
            measured={number: ranks for number, ranks in self.measured.items() if number <= step},
            plan=(self.measured_with or self.plan) if step > self.measured_since else None,
        )

    @property
    def phases(self) -> tuple[Band, ...]:
        """The freezing phases that the job's steps went through; empty if nothing is ever frozen."""
        return phase_bands(self.freeze_sections, self.step)

    @property
    def freeze_sections(self) -> tuple[tuple[int, Mapping[str, Any]], ...]:
        """(first step, the resolved `[freeze]` section from there on), oldest first."""
        return self.freeze.sections(self.spec.get("freeze", {}))

    def freeze_section_at(self, step: int) -> Mapping[str, Any]:
        """The `[freeze]` section that `step` follows."""
        return [section for first, section in self.freeze_sections if first <= step or first == 1][-1]

    @property
    def freeze_section(self) -> Mapping[str, Any]:
        """The newest `[freeze]` section by which anything freezes; the spec's if none does."""
        freezing = [each for _, each in self.freeze_sections if each.get("method", "none") != "none"]
        return freezing[-1] if freezing else self.freeze_sections[0][1]

    def freeze_history(self) -> FreezeHistory:
        """Earlier freezing, for a run that continues from here."""
        proposed = self.freeze.proposed
        phases = [(first, phases_of(section)) for first, section in self.freeze_sections]
        monitored = (
            of for step, of in self.measured.items() if step > self.measured_since and _monitors(phases, step)
        )
        return FreezeHistory(
            plans=tuple(plan for _, plan in sorted(self.freeze.plans.items())),
            monitored=tuple(chain.from_iterable(of_step.values() for of_step in monitored)),
            plan=self.measured_with or self.plan,
            solved=self.freeze.solved,
            proposed=proposed if proposed is not None and proposed.control is not None else None,
            prefixes=tuple(prefix for _, prefix in sorted(self.freeze.prefixes.items())),
        )

    def frozen_counts(self) -> ParameterCounts | None:
        """Freeze counts of each parameter; None if nothing was counted."""
        course, plan = self.course, self.plan
        if course is None and plan is not None:
            course = Course.of(plan.replicas, plan.microbatches, 1)
        if course is None:
            return None
        size = course.legs[0].microbatch_size
        return self.freeze.counted.add_up(self.step, lambda steps: course.taken(steps) // size)

    def fold(self, record: Record) -> None:
        """Fold one more event in."""
        before_s, self.last_s = self.last_s, record.time_s
        self.events += 1
        self._fold_parts(record)
        match record.event:
            case StepReport() as step:
                self._commit(step, record.time_s)
            case TimelineReport() as timeline:
                self._measure(timeline)
            case ValidationReport() as validation:
                self.validations[validation.step] = validation
                self.validated = max(self.validated, validation.step)
            case CheckpointReport() as checkpoint:
                _keep(self.checkpoints, checkpoint)
            case Submitted() as submitted:
                self._start(submitted, record.time_s, before_s)
            case FlopsCounted(flops_per_sample=count):
                self.flops_per_sample = count
            case Issued(plan=plan, alternatives=alternatives):
                issued = IssuedPlan(
                    time_s=record.time_s, step=self.step, plan=plan, alternatives=alternatives
                )
                self.plan, self.decisions = plan, [*self.decisions[1 - KEPT_DECISIONS :], issued]
            case Formed() as formed:
                self._form(formed)
            case SwitchReport(epoch=epoch, version=version, step=step):
                for plan in [decision.plan for decision in self.decisions]:
                    if (plan.epoch, plan.version) == (epoch, version):
                        self._follow(plan, step)
            case RankStarted(node=node):
                self.nodes.add(node)
            case Scaled() as scaled:
                self._resize(scaled)
            case Migrated() as moved:
                _keep(self.moves, moved)
            case Requested(request=request):
                self.stopping = self.stopping or request == Request.STOP
                self.pausing = self.pausing or request == "pause"
                self.state = "waiting" if request == "resume" else self.state
                _keep(self.requests, request)
            case Paused(requested=requested):
                self.state = "paused" if requested else "waiting"
                self.pausing = self.pausing and not requested
            case Finished(stopped=stopped) as outcome:
                self.outcome, self.state = outcome, "stopped" if stopped else "finished"
            case Failed() as outcome:
                self.outcome, self.state = outcome, "failed"
            case Rescued(step=step, error=None):
                self.rescued = step
            case SampleReport() as sample:
                self.sample = sample
            case Disturbed() as disturbed:
                self.disturbed = disturbed
            case _:
                pass
        note = note_of(record.event)
        if note is not None:
            _keep(self.notes, note)

    def _fold_parts(self, record: Record) -> None:
        """Fold `record` into each part of the view that it is for."""
        event = record.event
        self.recovery.fold(record)
        self.totals.fold(event)
        self.commands.fold(event)
        if isinstance(event, RanksEvent):
            self.ranks.fold(event, record.time_s)
        elif isinstance(event, CheckpointReport):
            self.ranks.save(event)
        elif isinstance(event, Skipped):
            self.ranks.skip(event.damage)
        elif isinstance(event, FreezeEvent):
            self.freeze.fold(event)
        elif isinstance(event, AdaptEvent):
            self.adapt.fold(event, record.time_s)
        elif isinstance(event, OutOfMemory | MemoryLimited):
            self.memory.fold(event)
        elif isinstance(event, CurvatureReport):
            self.curvature.fold(event, self.plan.unlike_places if self.plan else 1)

    def _start(self, submitted: Submitted, time_s: float, before_s: float) -> None:
        self.epoch = submitted.epoch
        if submitted.takeover:
            self.ranks.placing.clear()  # the next controller ends ranks that had not started
            return
        if self.runs:
            self.earlier_s += max(0.0, before_s - self.started_s)
        self.job, self.spec, self.state = submitted.job, submitted.spec, "starting"
        self.train_samples = submitted.train_samples
        self.runs += 1
        self.events = 1
        self.started_s, self.first_step_s, self.outcome = time_s, None, None
        self.commands, self.resizing = CommandTable(), ""
        self.nodes.clear()
        self.ranks, self.formed, self.followed = RanksView(), None, None
        self.stopping = self.pausing = False
        self.validated = self.rescued = 0
        # Its ranks are others, whatever their numbers.
        self.adapt, self.memory, self.disturbed = AdaptRecord(), MemoryRecord(), None
        self.freeze.begin(submitted.spec.get("freeze", {}), resume=submitted.resume)

    def _resize(self, scaled: Scaled) -> None:
        entry = self.commands.get(scaled.id)
        # A request for other spares alone leaves the one for ranks as it is.
        asked = {} if entry is None else entry.command.arguments
        if entry is None or any(asked.get(key) is not None for key in ("ranks", "pipelines")):
            self.resizing = scaled.id

    def _form(self, formed: Formed) -> None:
        self.formed = self.plan
        self.state = "training"
        self._take_back(formed.step)
        if self.plan is not None:
            self._follow(self.plan, formed.step)

    def _follow(self, plan: Plan, step: int) -> None:
        """The ranks follow `plan` from the step after `step` on."""
        if self.measured_with is not None and cut(self.measured_with) != cut(plan):
            self.measured_since = step
        self.followed = self.measured_with = plan

    def _take_back(self, step: int) -> None:
        """Void the steps after `step`: the new generation runs them again, and their measurements do not count.
        Decisions stand. This is the one rule for steps that a return to a checkpoint voids."""
        undone = max(0, self.step - step)
        self.step -= undone
        self.validated = min(self.validated, step)
        self.steps = up_to(self.steps, step)
        self.validations = up_to(self.validations, step)
        self.measured = up_to(self.measured, step)
        self.measured_since = min(self.measured_since, step)
        self.freeze.take_back(step)
        self.curvature.take_back(step)
        self.recovery.take_back(step, undone)
        if self.sample is not None and self.sample.step > step:
            self.sample = None

    def _commit(self, report: StepReport, time_s: float) -> None:
        self.steps[report.step] = report
        self.tokens += report.tokens or report.samples
        if self.first_step_s is None:
            self.first_step_s = time_s
        if report.step > self.step:
            # Steps are logged in order; a gap remains only where no rank is left to fill it.
            thinned, self.step = self.step // EVERY, report.step
            if report.step // EVERY != thinned:
                self._thin()

    def _thin(self) -> None:
        grid = Grid.at(self.step)
        self.steps, self.validations = thin(self.steps, grid), thin(self.validations, grid)
        self.freeze.thin(grid)
        self.curvature.thin(grid)
        self.recovery.thin(grid)

    def _measure(self, timeline: TimelineReport) -> None:
        self.measured.setdefault(timeline.step, {})[timeline.rank] = timeline
        self.freeze.measure(timeline.energies)
        phases = [(first, phases_of(section)) for first, section in self.freeze_sections]
        monitored = [step for step in self.measured if _monitors(phases, step)]
        if len(self.measured) - len(monitored) > RECENT_TIMELINES:
            del self.measured[min(self.measured.keys() - monitored)]
        if self._spans() > KEPT_SPANS and len(self.measured) > 1:
            others = sorted(self.measured.keys() - monitored)[:-1]
            for step in others or (monitored[:-1] or sorted(self.measured)[:-1])[::2]:
                del self.measured[step]

    def _spans(self) -> int:
        return sum(len(report.spans) for ranks in self.measured.values() for report in ranks.values())

    def to_json(self) -> bytes:
        """The view as JSON, less than 2 MB; numbers that are not finite are written by name."""
        return _ADAPTER.dump_json((self,))

    @staticmethod
    def from_json(text: bytes) -> JobView:
        """The view that `to_json` wrote.

        Raises:
            ValueError: the text is no view of this version.
        """
        return _ADAPTER.validate_json(text)[0]


_ADAPTER = TypeAdapter(tuple[JobView], config=ConfigDict(ser_json_inf_nan="strings"))


def _monitors(phases: Sequence[tuple[int, Phases | None]], step: int) -> bool:
    """Whether `step` is there to be timed; `phases` by their first step, oldest first."""
    *_, now = [each for first, each in phases if first <= step or first == 1]
    return now is not None and now.of(step) in MONITORING


def _keep(lines: list[T], line: T) -> None:
    lines.append(line)
    del lines[:-KEPT_LINES]


def fold(records: Iterable[Record]) -> JobView:
    """Fold `records`, oldest first, into a view."""
    view = JobView()
    for record in records:
        view.fold(record)
    return view
