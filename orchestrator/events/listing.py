"""The newest events of a job, by kind: a job that freezes writes so many reports of ranks that the rest is lost among
them. Pure: lines of a log in, events out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from orchestrator.events.types import KINDS, Record, kind_called, name_of_kind

FLOODS = frozenset(
    {"CurvatureReport", "FreezeReport", "FrozenCounts", "Sampled", "StandbyReport", "TimelineReport"}
)
"""Kinds of which each rank may write one in every step."""
MOST_LISTED = 200


@dataclass(frozen=True)
class Listing:
    """Events of some kinds."""

    counts: Mapping[str, int]
    """Kind -> how many there are, of every kind that there is, in the order of `KINDS`."""
    kinds: frozenset[str]
    """The kinds that are listed."""
    records: tuple[Record, ...]
    """The newest ones of these kinds, newest first."""
    more: int
    """Number of older events of these kinds that are not listed."""


def listing(lines: Iterable[str], kinds: Collection[str] = (), most: int = MOST_LISTED) -> Listing:
    """The newest `most` events of some kinds.

    Args:
        lines: of a log, oldest first; what is no event is passed over.
        kinds: to list; empty: all but `FLOODS`.
    """
    found = [(kind, line) for line in lines if (kind := _kind(line)) is not None]
    counts = Counter(kind for kind, _ in found)
    wanted = frozenset(kinds) if kinds else frozenset(KINDS) - FLOODS
    fitting = [line for kind, line in found if kind in wanted]
    records: list[Record] = []
    for line in reversed(fitting[-most:] if most else []):
        try:
            records.append(Record.from_json(line))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue
    return Listing(
        counts={kind: counts[kind] for kind in KINDS if kind in counts},
        kinds=wanted,
        records=tuple(records),
        more=max(0, len(fitting) - most),
    )


def _kind(line: str) -> str | None:
    """The kind of a line; None if it is no event."""
    try:
        fields = json.loads(line)
        name = name_of_kind(fields)
    except (ValueError, RecursionError, TypeError, KeyError):
        return None
    return kind_called(name) if isinstance(name, str) else None
