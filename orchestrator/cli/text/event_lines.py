"""Each event as one line: `freshet events`. Pure."""

from __future__ import annotations

from datetime import datetime

from orchestrator.events.types import Record, sentence_of


def event_line(number: int, record: Record) -> str:
    """The event with this number: its time in local time, its kind, and what happened."""
    time = datetime.fromtimestamp(record.time_s).strftime("%H:%M:%S")
    return f"{number:>6}  {time}  {record.kind:<16} {sentence_of(record.event)}".rstrip()
