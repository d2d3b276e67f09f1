"""A copy of a view stays as it was while the view goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from eventful_run import eventful
from synthetic_run import freezing_records

from orchestrator.events.types import Record
from orchestrator.history.copying import copied
from orchestrator.history.job_view import JobView


@pytest.mark.parametrize("records", [freezing_records, lambda: eventful().records])
def test_a_copy_stays_while_the_view_takes_more_events(records: Callable[[], Sequence[Record]]) -> None:
    view, copies = JobView(), []
    for number, record in enumerate(records()):
        view.fold(record)
        if number % 40 == 0:
            copies.append((copied(view), view.to_json()))
    assert len(copies) > 5
    for copy, text in copies:
        assert copy.to_json() == text
    assert copied(view) == view


def test_what_cannot_change_is_shared() -> None:
    view = JobView()
    for record in freezing_records():
        view.fold(record)
    copy = copied(view)
    step = max(view.steps)
    assert copy.steps is not view.steps
    assert copy.steps[step] is view.steps[step]
    assert copy.plan is view.plan
