"""Events by kind: those that flood a log are counted, and listed when they are asked for."""

from __future__ import annotations

from synthetic_run import freezing_records

from orchestrator.events.listing import FLOODS, listing
from orchestrator.events.types import KINDS, Issued
from workers.protocol.reports import FreezeReport, StepReport

LINES = [record.to_json() for record in freezing_records(steps=60)]


def test_floods_are_counted_and_left_out_until_they_are_chosen() -> None:
    usual = listing(LINES, most=10_000)
    assert KINDS.keys() >= FLOODS
    assert usual.counts["FreezeReport"] > usual.counts["StepReport"] == 60
    assert sum(usual.counts.values()) == len(LINES)
    assert not any(isinstance(record.event, FreezeReport) for record in usual.records)
    assert len(usual.records) == sum(count for kind, count in usual.counts.items() if kind not in FLOODS)
    times = [record.time_s for record in usual.records]
    assert times == sorted(times, reverse=True)


def test_the_newest_of_some_kinds() -> None:
    found = listing(LINES, ("StepReport", "Issued"), most=5)
    assert [record.event.step for record in found.records if isinstance(record.event, StepReport)] == [
        60, 59, 58, 57, 56,
    ]  # fmt: skip
    assert found.more == 60 + 1 - 5
    plans = listing(LINES, ("Issued",))
    assert [type(record.event) for record in plans.records] == [Issued]
    assert (plans.more, listing(LINES, ("Failed",)).records) == (0, ())


def test_lines_that_are_no_events_are_passed_over() -> None:
    bad = [
        "",
        "{",
        "[]",
        "3",
        '{"kind": 1}',
        '{"kind": "nothing"}',
        "[" * 100_000,
        '{"kind": "Issued"}',
        LINES[0],
    ]
    found = listing(bad)
    assert found.counts == {"Submitted": 1, "Issued": 1}
    assert len(found.records) == 1
