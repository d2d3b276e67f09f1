"""Words each event as one line: `freshet events`. Pure."""

from __future__ import annotations

import json
from dataclasses import fields
from datetime import datetime

from orchestrator.cli.text.progress import checkpoint_text, skipped_text, step_fields
from orchestrator.events import types as events
from orchestrator.events.types import Event, Record, named_floats
from orchestrator.events.wording import (
    adapted_text,
    checked_text,
    command_words,
    copied_text,
    low_text,
    moved_text,
    paused_text,
    short_text,
    solved_text,
)
from orchestrator.history.notes import note_of
from orchestrator.quantities import seconds
from planner.wording import counted, named
from workers.protocol import (
    CheckpointReport,
    CopiedAhead,
    FreezeStarted,
    LayersChecked,
    MemoryLow,
    NoticeReport,
    StandbyReport,
    StepReport,
    SwitchReport,
    ValidationReport,
)

LONGEST = 160
"""Most characters of an event that has no words of its own."""


def event_line(number: int, record: Record) -> str:
    """The event with this number: its time in local time, its kind, and what happened."""
    time = datetime.fromtimestamp(record.time_s).strftime("%H:%M:%S")
    return f"{number:>6}  {time}  {record.kind:<15} {event_text(record.event)}".rstrip()


def event_text(event: Event) -> str:
    """One-line text of `event`."""
    match event:
        case StepReport(skipped=True):
            return skipped_text(event)
        case StepReport(step=step):
            return f"step {step}  {step_fields(event)}"
        case ValidationReport(step=step, loss=loss):
            return f"step {step}  validation loss {loss:.4f}"
        case CheckpointReport():
            return checkpoint_text(event)
        case events.Commanded(name=name, arguments=arguments, id=id, by=by):
            called = command_words(name)
            what = f"{called} {json.dumps(arguments)}" if arguments else called
            return f"{what}, id {id}{f', by {by}' if by else ''}"
        case events.Answered(id=id, done=done, text=text):
            return f"{'done' if done else 'not done'}: {text}, id {id}"
        case events.Issued(plan=plan):
            return f"plan {plan.epoch}.{plan.version}: {plan.reason}"
        case events.Regrouped(step=step, reason=reason):
            return f"training goes on after step {step}: {reason}"
        case events.Finished(step=step, stopped=stopped, state_sha256=digest):
            return f"{'stopped' if stopped else 'done'} at step {step}, state {digest}"
        case events.OutOfMemory():
            return short_text(event)
        case MemoryLow():
            return low_text(event)
        case LayersChecked():
            return checked_text(event)
        case events.FreezeSolved():
            return solved_text(event)
        case events.Adapted():
            return adapted_text(event)
        case events.Migrated():
            return moved_text(event)
        case events.Paused():
            return paused_text(event)
        case _:
            return _of_ranks(event)


def _of_ranks(event: Event) -> str:
    """Text of an event about ranks and their copies of layers."""
    match event:
        case events.Placing(ranks=ranks):
            return f"the cluster is asked for {counted(len(ranks), 'rank')}: {named('rank', ranks)}"
        case events.RankStarted(rank=rank, host=host, pid=pid):
            return f"rank {rank} is up on {host}, process {pid}"
        case events.Formed(generation=generation, step=step):
            return f"generation {generation.number}, {named('rank', generation.members)}, trains from step {step} on"
        case events.Dismissed(ranks=ranks):
            return f"{named('rank', ranks)} released: the job needs no more spares"
        case events.RankEnded(outcome=outcome):
            return f"the rank in place {outcome.rank} has ended at step {outcome.step}"
        case FreezeStarted(plan=plan):
            return f"the ratios of freeze plan {plan.epoch}.{plan.version} take effect with step {plan.start}"
        case CopiedAhead():
            return copied_text(event)
        case StandbyReport(rank=place, pieces=pieces, step=step, snapshot=True):
            return f"the first snapshot in place {place} is complete at step {step}: {named('layer', pieces)}"
        case StandbyReport(rank=place, pieces=pieces, step=step, given_up=True):
            given_up = f"the copies in place {place} are given up at step {step}, for want of host memory"
            return f"{given_up}: {named('layer', pieces)}"
        case StandbyReport(rank=place, pieces=(), step=step):
            return f"place {place} has built at step {step} what it owns in the next generation"
        case StandbyReport(rank=place, pieces=pieces, step=step, built=built):
            rest = "" if built else "; it still builds what it owns in the next generation"
            return (
                f"the copies in place {place} are up to date at step {step}: {named('layer', pieces)}{rest}"
            )
        case SwitchReport(rank=place, epoch=epoch, version=version, step=step, stall_s=stall_s):
            still = seconds(stall_s)
            return (
                f"place {place} follows plan {epoch}.{version} after step {step}, {still} of standing still"
            )
        case NoticeReport(rank=rank, source=source, text=text):
            return f"rank {rank} has notice that it must leave ({source}): {text}"
        case _:
            note = note_of(event)
            return note.text if note is not None else _plain(event)


def _plain(event: Event) -> str:
    """The short fields of `event`."""
    shown = []
    for field in fields(event):
        value = getattr(event, field.name)
        if isinstance(value, str | int | float | bool):
            shown.append(f"{field.name} {json.dumps(named_floats(value))}")
    text = ", ".join(shown)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
