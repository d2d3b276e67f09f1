"""Words each event as a line for people while a job trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.cli.text.progress import BarProgress, LineProgress
from orchestrator.events import types as events
from orchestrator.events.types import level_of, sentence_of
from orchestrator.history.batch_course import course_in
from planner.course import Leg
from planner.wording import counted, pipelines_text
from workers.protocol.reports import (
    CheckpointReport,
    FaultReport,
    FreezeReport,
    PrefixFrozen,
    SampleReport,
    StepReport,
    TimelineReport,
    ValidationReport,
)


class TrainingLines:
    """An observer that shows reports as progress and other events in words.

    Args:
        hosts: hosts of the ranks that have started already.
    """

    def __init__(self, progress: BarProgress | LineProgress, hosts: Sequence[str] = ()) -> None:
        self._progress = progress
        self._hosts = {*hosts}
        self._beginning = "from initial weights"
        self._spec: Mapping[str, Any] = {}
        self._legs: tuple[Leg, ...] = ()

    def __call__(self, record: events.Record) -> None:
        """Show the event of `record`."""
        event = record.event
        if isinstance(event, PrefixFrozen) and event.leg is not None:
            self._lengthen(event.leg)
        match event:
            case (
                StepReport()
                | ValidationReport()
                | CheckpointReport()
                | TimelineReport()
                | SampleReport()
                | FreezeReport()
            ):
                self._progress.show(event)
            case events.Submitted(spec=spec):
                self._expect(spec)
            case events.Placing(ranks=ranks):
                self._progress.note(f"starting {counted(len(ranks), 'rank')}")
            case events.Issued(plan=plan):
                self._progress.note(
                    f"plan: {plan.schedule}, layers per stage {list(plan.layers_per_stage)},"
                    f" {counted(plan.pipeline_ranks, 'rank')}{pipelines_text(plan.pipeline_count, plan.replicas)}"
                )
            case events.RankStarted(host=host):
                self._hosts.add(host)
            case events.Formed(start=None, step=int(step)) if step:
                pass  # from the ranks' own state: `Regrouped` reports that they train again
            case events.Formed(generation=generation, start=start):
                where = f"{counted(len(generation.members), 'rank')} on {counted(len(self._hosts), 'host')}"
                begin = f"resuming from {start.path}" if start is not None else self._beginning
                self._progress.note(f"training: {where}, {begin}")
            case events.FreezeChanged(reason=reason) if reason:  # the job's own
                self._progress.note(sentence_of(event))
            case events.Requested() | events.Scaled() | events.FreezeChanged() | events.Failed():
                pass  # the answer to a command, and the exit of this command, say more
            case _:
                level = level_of(event)
                # Whoever watches the terminal did not cause these two.
                warns = level in ("warning", "error") or isinstance(event, events.Noticed | FaultReport)
                if level != "detail":
                    self._progress.note(sentence_of(event), warning=warns)

    def _expect(self, spec: Mapping[str, Any]) -> None:
        """Learn what a job of this resolved spec goes through."""
        self._spec = spec
        if steps := spec.get("job", {}).get("steps"):
            self._progress.expect_steps(steps)
        self._progress.expect_freezing(spec.get("freeze", {}))
        model = spec.get("model", {})
        if weights := model.get("weights") or (model.get("pretrained") and model.get("path")):
            self._beginning = f"from the weights in {weights}"

    def _lengthen(self, leg: Leg) -> None:
        """Expect the steps of a course whose newest leg is `leg`."""
        self._legs = (*(known for known in self._legs if known.step < leg.step), leg)
        course = course_in(self._spec, self._legs)
        if course is not None:
            self._progress.expect_steps(course.last_step(self._spec["job"]["steps"]))
