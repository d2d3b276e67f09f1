"""A notice that a node is about to go, and what all sources of notices have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Notice:
    """A node is about to go."""

    source: str
    """`file`, `sigterm`, `aws`, `gcp` or `azure`."""
    left_s: float | None
    """Seconds until it is gone, where that is known."""
    text: str
    """Two notices of one source are the same if their texts are."""


class NoticeError(Exception):
    """A source did not answer, or not as documented. Earlier notices still stand."""


class Source(Protocol):
    """Where notices come from."""

    name: str
    every_s: float
    """Seconds between two looks."""
    of_node: bool
    """Whether its notices are the node's: one rank of a node is enough to look. Else they are the process's."""

    def look(self) -> tuple[Notice, ...]:
        """The notices that stand now, without those that were withdrawn. May block for a few seconds.

        Raises:
            NoticeError: as it says.
        """
        ...
