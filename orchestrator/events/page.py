"""A page of a job's events, as a reader gets it for each request. A value; decides nothing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice

from orchestrator.events.types import Record

PAGE_RECORDS = 250
"""Most events that a driver gets at a time: pickling this many holds up the event loop for some 3 ms."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """Some events of a job."""

    records: tuple[Record, ...]
    missed: int
    """Number of requested events before these that are no longer kept."""
    next: int
    """The `after` that gets the events that follow."""
    over: bool
    """Whether the job has ended and these are its last events."""


def page_of(kept: Collection[Record], total: int, after: int, *, over: bool) -> Page:
    """Return the events that follow the first `after`.

    Args:
        kept: the newest of the job's `total` events.
        over: whether the job has ended.
    """
    first = total - len(kept)
    begin = max(after, first)
    fresh = tuple(islice(kept, begin - first, begin - first + PAGE_RECORDS))
    end = begin + len(fresh)
    if over and after > total:
        # A reader that has seen more than the log has still gets the end.
        fresh, end = tuple(kept)[-1:], total
    return Page(records=fresh, missed=begin - after, next=end, over=over and end >= total)
