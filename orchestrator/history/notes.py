"""The lines of a job's history that a person must see. Pure: an event in, a line out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from orchestrator.events.reports import ROWS
from orchestrator.events.types import KINDS, Event, Warned, level_of, sentence_of

Level = Literal["note", "warning", "error"]
_LEVELS = get_args(Level)


@dataclass(frozen=True)
class Note:
    """A line for people."""

    level: Level
    text: str


def note_of(event: Event) -> Note | None:
    """The line about `event` that a person must see, if any."""
    level = level_of(event)
    if level in ("detail", "progress"):
        return None
    text = sentence_of(event)
    if isinstance(event, Warned):  # it is written as a note
        return Note(level, text)
    stop = "" if text.endswith((".", "!", "?", "…")) else "."
    return Note(level, f"{text[:1].upper()}{text[1:]}{stop}")


def _may_be_noted(kind: type[Any]) -> bool:
    """Whether events of this kind have a level of notes, or a level that depends on their values."""
    level: object = ROWS[kind].level if kind in ROWS else vars(kind)["level"]
    return not isinstance(level, str) or level in _LEVELS


NOTED = tuple(name for name, kind in KINDS.items() if _may_be_noted(kind))
"""Kinds of events that a person may have to see."""
