"""Word that a node is to go, and what every place that such word comes from has in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Notice:
    """A node is to go."""

    source: str
    """`file`, `sigterm`, `aws`, `gcp` or `azure`."""
    left_s: float | None
    """Seconds until it is gone, as far as is known."""
    text: str
    """What was said. Two notices of one source are the same if their texts are."""


class NoticeError(Exception):
    """A source did not answer, or not as it should. What was said before still stands."""


class Source(Protocol):
    """Somewhere that word may come from."""

    name: str
    every_s: float
    """Seconds between two looks."""

    def look(self) -> tuple[Notice, ...]:
        """The notices that stand now; one that was withdrawn is no longer among them. May block for a few seconds.

        Raises:
            NoticeError: as it says.
        """
        ...
