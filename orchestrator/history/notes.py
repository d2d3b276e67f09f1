"""The lines of a job's history that a person must see. Pure: an event in, a line out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from orchestrator.events.types import (
    Event,
    Failed,
    FreezeChanged,
    FreezeSolved,
    LinksTimed,
    MemoryLimited,
    Noticed,
    ProfileDoubted,
    RankFailed,
    Requested,
    Scaled,
    Skipped,
    SpeedsChanged,
    Stalled,
    Submitted,
    Undrained,
    Warned,
)
from orchestrator.events.wording import (
    doubted_text,
    injected_text,
    limited_text,
    links_text,
    noticed_text,
    rescued_text,
    some_slower,
    speeds_text,
    stalled_text,
    undrained_text,
)
from planner.wording import counted
from workers.protocol import CheckpointReport, FaultReport, Rescued, WarningReport

Level = Literal["note", "warning", "error"]


@dataclass(frozen=True)
class Note:
    """A line for people."""

    level: Level
    text: str


def note_of(event: Event) -> Note | None:
    """The line about `event` that a person must see, if any."""
    match event:
        case Submitted(takeover=True, epoch=epoch):
            return Note("warning", f"The controller was lost; another one took over, as epoch {epoch}.")
        case Submitted(resume=True):
            return Note("note", "The job was resumed.")
        case Requested(request="stop"):
            return Note("note", "Someone cancelled the job.")
        case Requested(request="abort"):
            return Note("note", "Someone cancelled the job at once, without a checkpoint.")
        case Requested(request=request):
            return Note("note", f"Someone asked the job to {request}.")
        case Scaled(ranks=ranks, spares=spares, id=""):
            kept = f"{counted(ranks, 'rank')} in a pipeline and {counted(spares, 'spare rank')}"
            return Note("warning", f"The ranks that someone asked for did not come: the job keeps {kept}.")
        case Scaled(ranks=ranks, spares=spares):
            spare = counted(spares, "spare rank")
            return Note("note", f"Someone asked for {counted(ranks, 'rank')} in a pipeline and {spare}.")
        case Skipped(damage=damage):
            text = f"A damaged checkpoint was passed over: {damage.path}, {damage.file}: {damage.problem}."
            return Note("warning", text)
        case CheckpointReport(step=step, error=str(error)):
            return Note("warning", f"The checkpoint of step {step} failed, the ones before it stay: {error}")
        case FreezeSolved(measured_unfrozen_s=None):
            text = (
                "The freeze ratios rest on the profile's times: the monitored steps did not time all actions."
            )
            return Note("note", text)
        case FreezeChanged(method="none", by=by):
            return Note("note", f"{by or 'Someone'} turned freezing off.")
        case FreezeChanged(method=method, r_max=r_max, by=by):
            budget = f" with r_max = {r_max:g}" if method.startswith("timelyfreeze") else ""
            return Note("note", f"{by or 'Someone'} set the freeze method to {method}{budget}.")
        case SpeedsChanged(changes=(_, *_)):
            text = speeds_text(event)
            return Note("warning" if some_slower(event) else "note", f"{text[0].upper()}{text[1:]}.")
        case LinksTimed(changes=(_, *_)):
            text = links_text(event)
            return Note("warning", f"{text[0].upper()}{text[1:]}.")
        case MemoryLimited():
            text = limited_text(event)
            return Note("warning", f"{text[0].upper()}{text[1:]}.")
        case Noticed():
            return Note("note", f"Notice: {noticed_text(event)}.")
        case ProfileDoubted():
            text = doubted_text(event)
            return Note("warning", f"{text[0].upper()}{text[1:]}.")
        case Undrained(node=node, host=host):
            return Note("note", f"Undrained: {undrained_text(node, host)}.")
        case Warned(text=text):
            return Note("warning", text)
        case Stalled():
            text = stalled_text(event)
            return Note("warning", f"{text[0].upper()}{text[1:]}.")
        case FaultReport():
            return Note("note", f"{injected_text(event).capitalize()}.")
        case Rescued():
            text = rescued_text(event)
            return Note("warning", f"{text[0].upper()}{text[1:]}.")
        case WarningReport(rank=rank, text=text):
            return Note("warning", f"Rank {rank}: {text}")
        case RankFailed(rank=rank, error=error):
            return Note("error", f"Rank {rank} failed: {error}")
        case Failed(reason=reason):
            return Note("error", f"The job failed: {reason}")
        case _:
            return None
