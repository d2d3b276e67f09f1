"""The newest start of a job, in its log."""

from __future__ import annotations

from orchestrator.client.following import since_start
from orchestrator.events.types import Event, Record, Submitted, Warned


def submitted(epoch: int, *, takeover: bool = False) -> Submitted:
    return Submitted(job="a", epoch=epoch, spec={}, resume=epoch > 1, takeover=takeover)


def test_a_takeover_is_no_start() -> None:
    told: list[Event] = [
        submitted(1),
        Warned(text="x"),
        submitted(2),
        submitted(3, takeover=True),
        Warned(text="y"),
    ]
    records = [Record(time_s=0.0, event=event) for event in told]
    assert [record.event for record in since_start(records)] == told[2:]
    assert since_start(records[1:2]) == ()
