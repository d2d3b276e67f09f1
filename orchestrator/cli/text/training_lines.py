"""Words each event as a line for people while a job trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from orchestrator.cli.text.progress import BarProgress, LineProgress
from orchestrator.events import types as events
from orchestrator.events.wording import (
    adapted_text,
    doubted_text,
    injected_text,
    limited_text,
    links_text,
    moved_text,
    noticed_text,
    paused_text,
    rescued_text,
    solved_text,
    some_slower,
    speeds_text,
    stalled_text,
    undrained_text,
)
from orchestrator.quantities import seconds
from planner.wording import counted


def observer(
    progress: BarProgress | LineProgress, hosts: Sequence[str] = ()
) -> Callable[[events.Record], None]:
    """An observer that shows reports as progress and other events in words.

    Args:
        hosts: hosts of the ranks that have started already.
    """
    known = [*hosts]
    beginning = "from initial weights"

    def observe(record: events.Record) -> None:
        nonlocal beginning
        match record.event:
            case (
                events.StepReport()
                | events.ValidationReport()
                | events.CheckpointReport()
                | events.TimelineReport()
                | events.SampleReport()
                | events.FreezeReport()
            ):
                progress.show(record.event)
            case events.Submitted(spec=spec):
                progress.expect_freezing(spec.get("freeze", {}))
                if weights := spec.get("model", {}).get("weights"):
                    beginning = f"from the weights in {weights}"
            case events.Placing(ranks=ranks):
                progress.note(f"starting {counted(len(ranks), 'rank')}")
            case events.Issued(plan=plan):
                counts = list(plan.layers_per_stage)
                progress.note(
                    f"plan: {plan.schedule}, layers per stage {counts}, {counted(plan.world_size, 'rank')}"
                )
            case events.RankStarted(host=host):
                known.append(host)
            case events.Formed(start=None, step=int(step)) if step:
                return  # from the ranks' own state: `Regrouped` reports that they train again
            case events.Formed(generation=generation, start=start):
                where = f"{counted(len(generation.members), 'rank')} on {counted(len(set(known)), 'host')}"
                begin = f"resuming from {start.path}" if start is not None else beginning
                progress.note(f"training: {where}, {begin}")
            case events.Skipped(damage=damage):
                progress.note(
                    f"checkpoint {damage.path} is damaged and skipped: {damage.file} {damage.problem}",
                    warning=True,
                )
            case events.FreezeSolved() as solved:
                progress.note(f"freezing: {solved_text(solved)}")
            case events.SpeedsChanged() as changed:
                progress.note(speeds_text(changed), warning=some_slower(changed))
            case events.LinksTimed() as timed:
                progress.note(links_text(timed), warning=bool(timed.changes))
            case events.Adapted() as adapted:
                progress.note(adapted_text(adapted))
            case events.MemoryLimited() as limited:
                progress.note(limited_text(limited), warning=True)
            case events.FreezeStarted(plan=plan):
                progress.note(f"freezing: its ratios take effect with step {plan.start}")
            case events.Noticed() as notice:
                progress.note(noticed_text(notice), warning=True)
            case events.ProfileDoubted() as doubt:
                progress.note(doubted_text(doubt), warning=True)
            case events.Undrained(node=node, host=host):
                progress.note(undrained_text(node, host))
            case events.Warned(text=text):
                progress.note(text, warning=True)
            case events.Stalled() as stalled:
                progress.note(stalled_text(stalled), warning=True)
            case events.FaultReport() as inject:
                progress.note(injected_text(inject), warning=True)
            case events.Rescued() as rescued:
                progress.note(rescued_text(rescued), warning=True)
            case events.WarningReport(rank=rank, text=text):
                progress.note(f"rank {rank}: {text}", warning=True)
            case events.Regrouped() as regrouped:
                parts = (regrouped.detect_s, regrouped.settle_s, regrouped.plan_s, regrouped.move_s)
                took = seconds(sum(parts) + regrouped.resume_s)
                progress.note(
                    f"training goes on after step {regrouped.step}, {took} later: {regrouped.reason}"
                )
            case events.Migrated() as moved:
                progress.note(moved_text(moved))
            case events.Paused() as paused:
                progress.note(paused_text(paused), warning=not paused.requested)
            case events.RankFailed(rank=rank, error=error):
                progress.note(f"rank {rank}: {error}", warning=True)
            case _:
                return

    return observe
