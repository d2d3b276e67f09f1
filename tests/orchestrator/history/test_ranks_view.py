"""What a view keeps of nodes that go: each notice with its time and deadline, and the ranks that left without one."""

from __future__ import annotations

import pytest
from elastic_run import ElasticRun

from orchestrator.events.types import Noticed, Undrained
from orchestrator.history.job_view import JobView, fold
from orchestrator.history.ranks_view import KEPT_NOTICES, Departure, NodeNotice, RanksView
from orchestrator.history.recap import recap


def preempted() -> ElasticRun:
    """Rank 1 gets a notice and leaves in time; rank 2 dies without one; rank 3 is released on request."""
    run = ElasticRun()
    run.submit()
    for rank in range(4):
        run.rank(rank)
    run.form((0, 1, 2, 3))
    run.train(2)
    run.put(Noticed(node="node-1", host="127.0.0.1", source="aws", ranks=(1,), left_s=120.0))
    run.train(1)
    run.regroup((0, 2, 3), cause="drain", lost=(1,))
    run.train(1)
    run.lose(2)
    run.regroup((0, 3), lost=(2,))
    run.train(1)
    run.regroup((0,), cause="scale", lost=(3,))
    return run


def test_a_notice_keeps_its_time_and_deadline() -> None:
    run = preempted()
    view = fold(run.records)
    (record,) = (record for record in run.records if isinstance(record.event, Noticed))
    (notice,) = view.ranks.notices
    assert (notice.event, notice.time_s, notice.deadline_s) == (record.event, 1002.0, 1122.0)
    assert view.ranks.noticed == (record.event,)
    unknown = Noticed(node="n", host="", source="sigterm", ranks=(0,), left_s=None)
    assert NodeNotice(time_s=1.0, event=unknown).deadline_s is None


def test_a_drained_node_stays_drained_across_snapshots_until_it_is_undrained() -> None:
    run = preempted()
    run.put(Noticed(node="node-0", host="127.0.0.1", source="request", ranks=(0,), left_s=0.0, id="d"))
    view = JobView.from_json(fold(run.records).to_json())
    assert list(view.ranks.drained) == ["node-0"]  # and not node-1, whose notice was AWS's
    assert view.ranks.leaving("node-0") == {0}
    for _ in range(KEPT_NOTICES):
        view.ranks.fold(Noticed(node="n", host="", source="aws", ranks=(9,), left_s=None))
    assert "node-0" in {event.node for event in recap(view) if isinstance(event, Noticed)}
    view.ranks.fold(Undrained(node="node-0", host="127.0.0.1"))
    assert not view.ranks.drained
    assert "node-0" not in {event.node for event in recap(view) if isinstance(event, Noticed)}


def test_ranks_that_left_with_and_without_a_notice_are_told_apart() -> None:
    departures = fold(preempted().records).ranks.departures
    assert [(each.node, each.host, each.ranks, each.noticed) for each in departures] == [
        ("node-1", "127.0.0.1", (1,), True),
        ("node-2", "127.0.0.1", (2,), False),
    ]
    # When the failure was seen: before the 1.5 s that the recovery took.
    assert [each.time_s for each in departures] == pytest.approx([1003.0, 1006.0])


def test_notices_and_departures_survive_a_snapshot_and_are_bounded() -> None:
    view = fold(preempted().records)
    assert JobView.from_json(view.to_json()).ranks == view.ranks
    ranks = RanksView()
    for number in range(KEPT_NOTICES + 5):
        ranks.fold(Noticed(node="n", host="", source="aws", ranks=(0,), left_s=None), float(number))
    assert [notice.time_s for notice in ranks.notices] == [float(5 + n) for n in range(KEPT_NOTICES)]
    assert isinstance(view.ranks.departures[0], Departure)
