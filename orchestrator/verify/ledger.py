"""The ledger: what a job's events prove of its steps, samples, generations and epochs. Pure: events in, findings out.

A step stands from its report until a generation that begins before it voids it; it is keyed by generation and step.
Checkpoint files are checked in `checkpoint_audit.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from orchestrator.events.types import (
    Failed,
    Finished,
    Formed,
    Issued,
    RankEnded,
    Record,
    Regrouped,
    Submitted,
)
from planner.course import Course, Leg
from planner.wording import counted
from workers.data.buckets import Buckets
from workers.data.sampling import SampleStream, samples_at, samples_digest
from workers.protocol.reports import CheckpointReport, LayersChecked, Outcome, PrefixFrozen, StepReport
from workers.protocol.section import Shuffle
from workers.reproducibility.digest import state_digest

NEARBY = 3
"""A step with wrong samples is compared with this many steps on either side."""


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Samples that each step must use, by the resolved spec and the legs that the log has."""

    seed: int
    course: Course
    shuffle: Shuffle | None = None

    @staticmethod
    def of(spec: dict[str, Any], further: Sequence[Leg] = ()) -> Batches:
        """The batches of a resolved spec, as it is logged.

        Args:
            further: legs of the course after the one that the spec says.
        """
        pipeline = spec["pipeline"]
        return Batches(
            seed=spec["job"]["seed"],
            course=Course.of(
                pipeline.get("replicas", 1),
                pipeline["microbatches"],
                pipeline["microbatch_size"],
                further,
            ),
            shuffle=spec.get("data", {}).get("shuffle"),
        )

    def digest(self, step: int, train_samples: SampleStream) -> str:
        """Digest of the samples of `step`, which is 1 for the first one."""
        leg = self.course.at(step)
        return samples_digest(
            {
                microbatch: samples_at(
                    self.seed, self.course.positions(step, microbatch), train_samples, self.shuffle
                )
                for microbatch in range(leg.replicas * leg.microbatches)
            }
        )


@dataclass
class Ledger:
    """The findings in a log, and the steps that stand."""

    wrong: list[str] = field(default_factory=list)
    """Errors, each with its numbers; a correct job has none."""
    unproved: list[str] = field(default_factory=list)
    """Facts that the log does not prove."""
    assumed: list[str] = field(default_factory=list)
    """Assumptions of every proof, and facts that were not checked."""
    facts: list[str] = field(default_factory=list)
    """Checks by other audits than this one."""
    claims: list[str] = field(default_factory=list)
    """Facts that these checks prove, if nothing is wrong."""
    spec: dict[str, Any] = field(default_factory=dict)
    """The resolved spec of the newest start."""
    standing: list[StepReport | None] = field(default_factory=list)
    """By step, from 1; None if not in this log."""
    legs: dict[int, Leg] = field(default_factory=dict)
    """Legs of the batch's course after the one that the spec says, by their first step."""
    superseded: int = 0
    """Steps that were committed, then voided by a return to a checkpoint or a snapshot, and run again."""
    generations: int = 0
    epochs: int = 0
    """Number of starts and takeovers of the job by a controller."""
    checkpoints: list[CheckpointReport] = field(default_factory=list)
    """Checkpoints reported as complete, oldest first."""
    end: Finished | Failed | None = None
    """End of the newest start; None if the job runs, or was killed."""
    compared: set[str] = field(default_factory=set)
    """The layers that ranks compared with plain autograd before they trained them."""
    left_whole: set[str] = field(default_factory=set)
    """Layers among them that were left to plain autograd."""
    proved_samples: int = 0
    """Steps whose samples were compared."""

    @property
    def steps(self) -> int:
        """Number of steps that stand."""
        return len(self.standing)

    @property
    def batches(self) -> Batches:
        """The samples of its steps; only with a spec."""
        return Batches.of(self.spec, [leg for _, leg in sorted(self.legs.items())])

    @property
    def knows_batches(self) -> bool:
        """Whether the log has every leg: not if the batch grows, and the log begins late."""
        scales = self.spec.get("freeze", {}).get("batch") == "scale"
        return not (scales and self.standing and self.standing[0] is None)


def audit(records: Iterable[Record], train_samples: SampleStream | None) -> Ledger:
    """Check `records`, oldest first.

    Args:
        train_samples: the samples to train on, as `train_places` has them, by the first leg of the course; None:
            unknown, so that no step's samples are compared.
    """
    reading = _Reading()
    for record in records:
        reading.fold(record)
    ledger = reading.ledger
    if ledger.end is None:
        ledger.unproved.append("how the job ends: the log stops before, so it is at work or was killed")
    elif isinstance(ledger.end, Failed):
        ledger.unproved.append(f"the final bits: the job failed ({ledger.end.reason})")
    _check_samples(ledger, train_samples)
    return ledger


class _Reading:
    """The ledger while the log is read."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self._epoch = 0
        self._plan = (0, 0)
        self._formed: dict[int, int] = {}
        """Generation -> step at which it began."""
        self._voided: dict[int, int] = {}
        """Generation -> steps that it voided."""
        self._untrained = 0
        """Steps voided by generations that formed and did not train, since one last trained."""
        self._outcomes: list[Outcome] = []

    def fold(self, record: Record) -> None:
        match record.event:
            case Submitted() as submitted:
                self._submitted(submitted)
            case Issued(plan=plan):
                self._issued(plan.epoch, plan.version)
            case Formed() as formed:
                self._form(formed)
            case Regrouped() as regrouped:
                self._regrouped(regrouped)
            case StepReport() as report:
                self._step(report)
            case PrefixFrozen(leg=Leg() as leg):
                self._grow(leg)
            case LayersChecked(layers=layers, whole=whole):
                self.ledger.compared.update(layers)
                self.ledger.left_whole.update(whole)
            case CheckpointReport(error=None) as checkpoint:
                self.ledger.checkpoints.append(checkpoint)
            case RankEnded(outcome=outcome):
                self._outcomes.append(outcome)
            case Finished() as finished:
                self._finish(finished)
            case Failed() as failed:
                self.ledger.end = failed

    def _wrong(self, text: str) -> None:
        self.ledger.wrong.append(text)

    def _submitted(self, submitted: Submitted) -> None:
        ledger = self.ledger
        if submitted.epoch <= self._epoch:
            self._wrong(
                f"controller epoch {submitted.epoch} came after epoch {self._epoch}: epochs must rise"
            )
        if ledger.spec and Batches.of(ledger.spec) != Batches.of(submitted.spec):
            self._wrong(
                f"epoch {submitted.epoch} began with {Batches.of(submitted.spec)} where it was"
                f" {Batches.of(ledger.spec)}: samples no longer follow on"
            )
        self._epoch = max(self._epoch, submitted.epoch)
        ledger.spec, ledger.end = submitted.spec, None
        ledger.epochs += 1

    def _issued(self, epoch: int, version: int) -> None:
        if (epoch, version) < self._plan:
            self._wrong(
                f"plan {epoch}.{version} (epoch.version) was issued after {self._plan[0]}.{self._plan[1]}"
            )
        self._plan = max(self._plan, (epoch, version))

    def _form(self, formed: Formed) -> None:
        ledger, generation = self.ledger, formed.generation
        newest = max(self._formed, default=0)
        if generation.number <= newest:
            self._wrong(
                f"generation {generation.number} was formed after generation {newest}: they must rise"
            )
        if generation.epoch != self._epoch:
            self._wrong(
                f"generation {generation.number} was formed by controller epoch {generation.epoch} during epoch"
                f" {self._epoch}"
            )
        begin = formed.step
        if begin is None:
            begin = formed.start.step if formed.start is not None else 0
        void = ledger.steps - begin
        if void > 0:
            if formed.start is None and begin > 0 and not formed.snapshot:
                self._wrong(
                    f"generation {generation.number} began at step {begin} without a checkpoint or a snapshot, but"
                    f" {void} later steps, up to {ledger.steps}, had been committed"
                )
            del ledger.standing[begin:]
            ledger.superseded += void
            ledger.legs = {first: leg for first, leg in ledger.legs.items() if first <= begin + 1}
        elif void < 0 and formed.start is not None and not self._formed:
            # The beginning of the log was lost; everything after the checkpoint is here.
            ledger.unproved.append(f"steps {ledger.steps + 1} to {begin} are not in this log")
            ledger.standing += [None] * -void
        self._untrained += self._voided.get(newest, 0)
        self._formed[generation.number] = begin
        self._voided[generation.number] = max(0, void)
        ledger.generations += 1
        self._outcomes.clear()

    def _regrouped(self, regrouped: Regrouped) -> None:
        number = regrouped.generation
        begin = self._formed.get(number)
        if begin is None:
            self._wrong(f"generation {number} trained, but the log does not say that it was formed")
            return
        if begin != regrouped.step:
            self._wrong(f"generation {number} was formed at step {begin} and trained from {regrouped.step}")
        if not 0 <= regrouped.rerun <= 1:
            self._wrong(
                f"generation {number} ran {counted(regrouped.rerun, 'step')} in flight again, where 1 is the most"
            )
        # A step may be committed and lost before it was announced.
        announced = self._voided[number]
        if not announced <= regrouped.steps_lost <= announced + self._untrained + 1:
            self._wrong(
                f"generation {number} says that {regrouped.steps_lost} committed steps were lost; the log shows"
                f" {announced}"
            )
        self._untrained = self._voided[number] = 0

    def _step(self, report: StepReport) -> None:
        ledger = self.ledger
        current = max(self._formed, default=0)
        if report.generation not in self._formed:
            self._wrong(
                f"step {report.step} was committed by generation {report.generation}, which was not formed"
            )
        elif report.generation < current and report.step > self._formed[current]:
            self._wrong(
                f"step {report.step} of generation {report.generation} was announced after generation {current} had"
                f" begun at step {self._formed[current]}"
            )
        if report.step <= ledger.steps:
            earlier = ledger.standing[report.step - 1]
            by = f"generation {earlier.generation}" if earlier is not None else "before this log began"
            self._wrong(
                f"step {report.step} was committed twice: {by}, then generation {report.generation}, and nothing"
                " voided the first"
            )
            return
        missing = report.step - ledger.steps - 1
        if missing:
            which = (
                f"step {report.step - 1}"
                if missing == 1
                else f"steps {ledger.steps + 1} to {report.step - 1}"
            )
            self._wrong(f"{which} missing: step {report.step} came after step {ledger.steps}")
            ledger.standing += [None] * missing
        ledger.standing.append(report)

    def _grow(self, leg: Leg) -> None:
        """Take up a leg of the batch's course, if it goes on where the one before ends."""
        legs = self.ledger.legs
        if legs.get(leg.step) == leg:
            return
        further = [*(one for first, one in sorted(legs.items()) if first != leg.step), leg]
        try:
            _ = Batches.of(self.ledger.spec, further)
        except ValueError as error:
            self._wrong(str(error))
            return
        legs[leg.step] = leg

    def _finish(self, finished: Finished) -> None:
        ledger = self.ledger
        ledger.end = finished
        if finished.step != ledger.steps:
            self._wrong(
                f"the job finished at step {finished.step}, but the log has {counted(ledger.steps, 'step')}"
            )
        asked = ledger.spec.get("job", {}).get("steps", finished.step)
        if ledger.legs:
            asked = ledger.batches.course.last_step(asked)
        if not finished.stopped and not finished.why and finished.step != asked and ledger.knows_batches:
            self._wrong(f"the job finished at step {finished.step} of {asked} though nobody stopped it")
        digests: dict[int, str] = {}
        for outcome in self._outcomes:
            for layer, digest in outcome.layer_digests:
                if digests.setdefault(layer, digest) != digest:
                    self._wrong(f"layer {layer} ended with other bits on rank {outcome.rank} than on another")
        if digests and finished.state_sha256 is not None:
            ended = state_digest([digests[layer] for layer in sorted(digests)])
            if ended != finished.state_sha256:
                self._wrong(
                    f"the ranks ended with state_sha256 {ended}, but the job says {finished.state_sha256}"
                )


def _check_samples(ledger: Ledger, train_samples: SampleStream | None) -> None:
    """Compare the samples of each standing step with those that it must use. Positions continue from step to step, so
    if every step is right, no sample is used twice or skipped."""
    reports = [report for report in ledger.standing if report is not None]
    if not reports:
        return
    if not ledger.knows_batches:
        ledger.unproved.append(
            f"which samples the steps used: the batch grows, and steps before {reports[0].step}, in which it may have"
            " grown, are not in this log"
        )
        return
    batches = ledger.batches
    if isinstance(train_samples, Buckets):
        train_samples = replace(train_samples, course=batches.course)
    for report in reports:
        due = batches.course.at(report.step).batch
        if report.samples != due:
            ledger.wrong.append(f"step {report.step} used {report.samples} samples, where a step has {due}")
    known = [report for report in reports if report.samples_digest]
    if len(known) < len(reports):
        ledger.unproved.append(
            f"which samples {len(reports) - len(known)} of {len(reports)} steps used: their reports do not say"
        )
    if train_samples is None:
        return
    for report in known:
        if report.samples_digest != batches.digest(report.step, train_samples):
            ledger.wrong.append(_other_samples(report, batches, train_samples))
    ledger.proved_samples = len(known)


def _other_samples(report: StepReport, batches: Batches, train_samples: SampleStream) -> str:
    first, stop = batches.course.taken(report.step - 1), batches.course.taken(report.step)
    text = (
        f"step {report.step} did not use the samples at positions {first} to {stop - 1} of the data's order"
    )
    for step in _nearby(report.step):
        if report.samples_digest == batches.digest(step, train_samples):
            return f"{text}, but those of step {step}"
    return text


def _nearby(step: int) -> Iterator[int]:
    for distance in range(1, NEARBY + 1):
        if step > distance:
            yield step - distance
        yield step + distance
