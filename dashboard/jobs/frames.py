"""The newest events of a job as numbered lines, for readers who come and go. Pure.

A reader that asks for lines that are no longer kept is told how many it missed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice

KEPT_FRAMES = 5_000


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
    """What a reader gets."""

    frames: tuple[Frame, ...]
    missed: int
    next: int
    """What to ask after next time."""


class Frames:
    """The newest `KEPT_FRAMES` events."""

    def __init__(self) -> None:
        self._kept: deque[Frame] = deque(maxlen=KEPT_FRAMES)
        self.newest = 0
        """Number of the newest event, kept or not."""

    def append(self, frame: Frame) -> None:
        """Add the next event."""
        self._kept.append(frame)
        self.newest = frame.number

    def after(self, number: int, most: int) -> Slice:
        """Up to `most` events after the one with `number`. A number from before the job's newest start, larger than
        there are events, counts as 0."""
        if number > self.newest:
            number = 0
        first = self.newest - len(self._kept)
        begin = max(number, first)
        found = tuple(islice(self._kept, begin - first, begin - first + most))
        return Slice(found, begin - number, begin + len(found))
