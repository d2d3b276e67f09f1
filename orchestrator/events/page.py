"""Some events of a job, as a reader gets them who asks again and again. A value; decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.events.types import Record


@dataclass(frozen=True, kw_only=True)
class Page:
    """Some events of a job."""

    records: tuple[Record, ...]
    missed: int
    """How many of the requested events before these are no longer kept."""
    next: int
    """The `after` that gets the events that follow."""
    over: bool
    """Whether the job has ended and these are its last events."""
