"""Levels of events: how much each matters to people. Knows no event."""

from __future__ import annotations

from typing import Literal

Level = Literal["detail", "progress", "note", "warning", "error"]
"""Where an event's sentence stands: a `detail` in lists of events only, `progress` also in the terminal that trains the
job, all others also among the job's notes."""
LONGEST = 160
"""Most characters of a long text that a sentence quotes."""


def shortened(text: str) -> str:
    """The first `LONGEST` characters of `text`, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"
