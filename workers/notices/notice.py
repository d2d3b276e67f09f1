"""A notice that a node is about to leave, and the interface of all sources of notices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Notice:
    """A node is about to leave."""

    source: str
    """`file`, `sigterm`, `aws`, `gcp` or `azure`."""
    left_s: float | None
    """Seconds until the node is gone; None if unknown."""
    text: str
    """Describes the notice. Two notices of one source with the same text are the same notice."""


class NoticeError(Exception):
    """A source did not answer, or not as documented. Earlier notices still stand."""


class NoticeSource(Protocol):
    """A source of notices."""

    name: str
    every_s: float
    """Seconds between two calls of `look`."""
    of_node: bool
    """Whether its notices concern the node, so that one rank per node can watch it; else only the process."""

    def look(self) -> tuple[Notice, ...]:
        """The notices in force now, without withdrawn ones. May block for a few seconds.

        Raises:
            NoticeError: the source did not answer, or not as documented.
        """
        ...
