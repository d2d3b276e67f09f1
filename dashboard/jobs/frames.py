"""The newest events of a job as numbered lines, for readers who come and go. Pure.

A reader that asks for lines that are no longer kept is told how many it missed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice

KEPT_FRAMES = 5_000
MOST_CHARACTERS = 8 * 2**20
"""Most text of all events that are kept: some events are long."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One event."""

    number: int
    """1 for the first event since the job's newest start."""
    kind: str
    line: str
    """The event as one line of JSON."""


@dataclass(frozen=True)
class Slice:
    """Events for a reader, and how many it missed."""

    frames: tuple[Frame, ...]
    missed: int
    next: int
    """Number of the event to ask after next time."""


class Frames:
    """The newest events.

    Args:
        newest: number of the last event before them.
    """

    def __init__(self, newest: int = 0) -> None:
        self.newest = newest
        """Number of the newest event, kept or not."""
        self._kept: deque[Frame] = deque()
        self._characters = 0

    def append(self, frame: Frame) -> None:
        """Add the next event."""
        self._kept.append(frame)
        self._characters += len(frame.line)
        self.newest = frame.number
        while len(self._kept) > KEPT_FRAMES or self._characters > MOST_CHARACTERS:
            self._characters -= len(self._kept.popleft().line)

    def after(self, number: int, most: int, kinds: Collection[str] = ()) -> Slice:
        """Up to `most` events after the one with `number`; none if there are not as many events, and then `next` is
        less than `number`.

        Args:
            kinds: of the events that count; empty: all do.
        """
        first = self.newest - len(self._kept)
        number = min(number, self.newest)
        begin = max(number, first)
        rest = islice(self._kept, begin - first, None)
        found = tuple(islice((frame for frame in rest if not kinds or frame.kind in kinds), most))
        whole = kinds and len(found) < most
        end = self.newest if whole else found[-1].number if found else begin
        return Slice(found, begin - number, end)
