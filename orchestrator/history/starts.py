"""Where a log's newest start begins. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.events.types import Record, Submitted


def since_start(records: Sequence[Record]) -> tuple[Record, ...]:
    """The records since the job was last submitted. A takeover is no start: the records of the controller before it
    are included."""
    starts = [
        index
        for index, record in enumerate(records)
        if isinstance(record.event, Submitted) and not record.event.takeover
    ]
    return tuple(records[starts[-1] :]) if starts else ()
