"""What the log tells of speeds and links becomes what the next planner begins with."""

from __future__ import annotations

from orchestrator.events.types import LinksTimed, SpeedsChanged
from orchestrator.history.adapt_record import AdaptRecord
from planner.adapt.past import Past
from planner.simulation.slow_links import SlowLink

PAST = Past(changed=((0, 1), (3, 5)), before=((3, 1.0),), fast_steps=((4, 2.0),), links_changed=2)
SPEEDS = SpeedsChanged(
    step=7, slowdowns=((0, 1.0), (3, 2.5)), changes=(), lasting_steps=200, since=5, past=PAST
)
LINK = SlowLink(source=0, target=3, latency_s=0.002, bytes_per_s=1.2e7)


def test_a_link_that_changes_after_the_speeds_is_the_last_change() -> None:
    record = AdaptRecord()
    record.fold(SPEEDS, 0.0)
    assert (record.known, record.past) == (SPEEDS.slowdowns, PAST)
    assert record.past.age(9) == 4
    record.fold(LinksTimed(step=8, links=(LINK,)), 1.0)
    assert record.past.age(9) == 1
    assert record.past.fast_steps == PAST.fast_steps
