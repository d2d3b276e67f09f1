"""Runs `freshet events`, and follows a job that was submitted to a service: its events as lines, over Ray or REST."""

from __future__ import annotations

import json
from collections.abc import Callable

from orchestrator.cli.exit_codes import DONE, FAILED
from orchestrator.cli.text.event_lines import event_line
from orchestrator.client.blocking_client import BlockingJobs
from orchestrator.client.jobs import POLL_S
from orchestrator.client.opening import opened
from orchestrator.events.types import Failed, Record
from workers.protocol import JobError


def events_command(
    job: str,
    address: str | None,
    *,
    after: int,
    follow: bool,
    as_json: bool,
    show: Callable[[str], None],
) -> None:
    """Show the events of the job's newest start after the first `after`.

    Args:
        follow: go on as they happen, until the job has ended.

    Raises:
        JobError: nothing answers at `address`, there is no such job, or its controller does not answer.
        KeyboardInterrupt: a signal came while following.
    """
    with opened(address) as client:
        _show_events(client, job, after=after, follow=follow, as_json=as_json, show=show)


def follow_events(job: str, address: str, show: Callable[[str], None]) -> int:
    """Show the job's events until it has ended, and return its exit code.

    Raises:
        JobError: nothing answers at `address`, the job has no controller any more, or it failed for a reason that the
            user can fix.
        KeyboardInterrupt: a signal came; the job goes on.
    """
    with opened(address) as client:
        last = _show_events(client, job, after=0, follow=True, as_json=False, show=show)
    match last.event if last is not None else None:
        case Failed(user_error=True, reason=reason):
            raise JobError(reason)
        case Failed():
            return FAILED
        case _:
            return DONE


def _show_events(
    client: BlockingJobs, job: str, *, after: int, follow: bool, as_json: bool, show: Callable[[str], None]
) -> Record | None:
    """The last event that was shown."""
    over, last = False, None
    while not over:
        page = client.page(job, after, POLL_S if follow else 0.0)
        if page.missed:
            text = f"{page.missed:,} events are no longer kept here: {job}'s log has them"
            show(json.dumps({"missed": page.missed}) if as_json else text)
        first = page.next - len(page.records) + 1
        for number, record in enumerate(page.records, first):
            show(record.to_json() if as_json else event_line(number, record))
            last = record
        after = page.next
        over = page.over or not (follow or page.records or page.missed)
    return last
