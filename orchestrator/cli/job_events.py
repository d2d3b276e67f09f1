"""Runs `freshet events`, and follows a job that was submitted to a service: its events as lines, over Ray or REST."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Collection
from datetime import datetime

from orchestrator.cli.exit_codes import DONE, FAILED
from orchestrator.client.blocking_client import BlockingJobs
from orchestrator.client.jobs import POLL_S
from orchestrator.client.opening import opened
from orchestrator.events.types import KINDS, Failed, Record, kind_called, sentence_of
from workers.protocol.errors import JobError


def event_line(number: int, record: Record) -> str:
    """The event with this number: its time in local time, its kind, and what happened."""
    time = datetime.fromtimestamp(record.time_s).strftime("%H:%M:%S")
    return f"{number:>6}  {time}  {record.kind:<16} {sentence_of(record.event)}".rstrip()


def events_command(
    job: str,
    address: str | None,
    *,
    after: int,
    follow: bool,
    as_json: bool,
    kinds: Collection[str],
    show: Callable[[str], None],
) -> None:
    """Show the events of the job's newest start after the first `after`.

    Args:
        follow: go on as they happen, until the job has ended.
        kinds: those to show; empty: all.

    Raises:
        JobError: there is no such kind of event, nothing answers at `address`, there is no such job, or its controller
            does not answer.
        KeyboardInterrupt: a signal came while following.
    """
    chosen = [_checked_kind(kind) for kind in kinds]
    with opened(address) as client:
        _show_events(client, job, after=after, follow=follow, as_json=as_json, kinds=chosen, show=show)


def _checked_kind(name: str) -> str:
    if (kind := kind_called(name)) is not None:
        return kind
    near = difflib.get_close_matches(name, KINDS, n=1)
    raise JobError(
        f"--kind: there is no event {name!r}"
        + (f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(sorted(KINDS))}")
    )


def follow_events(job: str, address: str, show: Callable[[str], None]) -> int:
    """Show the job's events until it has ended, and return its exit code.

    Raises:
        JobError: nothing answers at `address`, the job has no controller any more, or it failed for a reason that the
            user can fix.
        KeyboardInterrupt: a signal came; the job goes on.
    """
    with opened(address) as client:
        last = _show_events(client, job, after=0, follow=True, as_json=False, kinds=(), show=show)
    match last.event if last is not None else None:
        case Failed(user_error=True, reason=reason):
            raise JobError(reason)
        case Failed():
            return FAILED
        case _:
            return DONE


def _show_events(
    client: BlockingJobs,
    job: str,
    *,
    after: int,
    follow: bool,
    as_json: bool,
    kinds: Collection[str],
    show: Callable[[str], None],
) -> Record | None:
    """The last event, of any kind."""
    over, last = False, None
    while not over:
        page = client.page(job, after, POLL_S if follow else 0.0)
        if page.missed:
            text = f"{page.missed:,} events are no longer kept here: {job}'s log has them"
            show(json.dumps({"missed": page.missed}) if as_json else text)
        first = page.next - len(page.records) + 1
        for number, record in enumerate(page.records, first):
            if not kinds or record.kind in kinds:
                show(record.to_json() if as_json else event_line(number, record))
            last = record
        after = page.next
        over = page.over or not (follow or page.records or page.missed)
    return last
