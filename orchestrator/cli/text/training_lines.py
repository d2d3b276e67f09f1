"""Words each event as a line for people while a job trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


def observer(
    progress: BarProgress | LineProgress, hosts: Sequence[str] = ()
) -> Callable[[events.Record], None]:
    """An observer that shows reports as progress and other events in words.

    Args:
        hosts: hosts of the ranks that have started already.
    """
    known = [*hosts]
    beginning = "from initial weights"
    resolved: Mapping[str, Any] = {}
    legs: tuple[Leg, ...] = ()

    def observe(record: events.Record) -> None:
        nonlocal beginning, resolved, legs
        event = record.event
        if isinstance(event, PrefixFrozen) and event.leg is not None:
            legs = (*(leg for leg in legs if leg.step < event.leg.step), event.leg)
            course = course_in(resolved, legs)
            if course is not None:
                progress.expect_steps(course.last_step(resolved["job"]["steps"]))
        match event:
            case (
                StepReport()
                | ValidationReport()
                | CheckpointReport()
                | TimelineReport()
                | SampleReport()
                | FreezeReport()
            ):
                progress.show(event)
            case events.Submitted(spec=spec):
                resolved = spec
                if steps := spec.get("job", {}).get("steps"):
                    progress.expect_steps(steps)
                progress.expect_freezing(spec.get("freeze", {}))
                model = spec.get("model", {})
                if weights := model.get("weights") or (model.get("pretrained") and model.get("path")):
                    beginning = f"from the weights in {weights}"
            case events.Placing(ranks=ranks):
                progress.note(f"starting {counted(len(ranks), 'rank')}")
            case events.Issued(plan=plan):
                counts = list(plan.layers_per_stage)
                pipelines = pipelines_text(plan.pipeline_count, plan.replicas)
                progress.note(
                    f"plan: {plan.schedule}, layers per stage {counts},"
                    f" {counted(plan.pipeline_ranks, 'rank')}{pipelines}"
                )
            case events.RankStarted(host=host):
                known.append(host)
            case events.Formed(start=None, step=int(step)) if step:
                return  # from the ranks' own state: `Regrouped` reports that they train again
            case events.Formed(generation=generation, start=start):
                where = f"{counted(len(generation.members), 'rank')} on {counted(len(set(known)), 'host')}"
                begin = f"resuming from {start.path}" if start is not None else beginning
                progress.note(f"training: {where}, {begin}")
            case events.FreezeChanged(reason=reason) if reason:  # the job's own
                progress.note(sentence_of(event))
            case events.Requested() | events.Scaled() | events.FreezeChanged() | events.Failed():
                return  # the answer to a command, and the exit of this command, say more
            case _:
                level = level_of(event)
                # Whoever watches the terminal did not cause these two.
                warns = level in ("warning", "error") or isinstance(event, events.Noticed | FaultReport)
                if level != "detail":
                    progress.note(sentence_of(event), warning=warns)

    return observe
