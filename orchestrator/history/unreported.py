"""The reports that ranks left in the job's folder because no controller took them, as records of its log.

Ranks leave them when the cluster's head is lost: `workers.checkpoint.left_behind.py`. Readers add them to the log's own
records, and a resumed job takes them into the log.
"""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.events.types import Record
from orchestrator.history.folder import JobFolder
from workers.checkpoint.left_behind import clear, left_reports
from workers.protocol.reports import StepReport


def unreported(location: str, logged: Iterable[Record]) -> list[Record]:
    """The reports left in the folder at `location` that the log lacks: each once, and steps only where they follow on
    the log's last one.

    Args:
        logged: the log's records, or those of its newest start.

    Raises:
        OSError: a file cannot be read.
    """
    left = {
        _content(record): record
        for record in (Record(time_s=time_s, event=report) for time_s, report in left_reports(location))
    }
    if not left:
        return []
    kinds = {type(record.event) for record in left.values()}
    step = 0
    for record in logged:
        if isinstance(record.event, StepReport):
            step = record.event.step
        if type(record.event) in kinds:
            left.pop(_content(record), None)
    lacking = []
    for record in left.values():
        if isinstance(record.event, StepReport):
            if record.event.step != step + 1:
                continue
            step += 1
        lacking.append(record)
    return lacking


def take_in(folder: JobFolder) -> int:
    """Write what ranks left into the log of a job that is about to resume, and delete it. Return how many reports there
    were.

    Raises:
        JobError: a controller is at work in the folder, or its log is damaged.
        OSError: the folder cannot be read or written.
    """
    lacking = unreported(folder.location, folder.records())
    if lacking:
        lock = folder.lock()
        try:
            folder.add(*lacking)
        finally:
            if lock is not None:
                lock.close()
    clear(folder.location)
    return len(lacking)


def _content(record: Record) -> str:
    return Record(time_s=0.0, event=record.event).to_json()
