"""How node-seconds are used: an eventful rehearsal computed by hand, and properties of any rehearsal."""

from __future__ import annotations

from dataclasses import replace

import pytest
from elastic_run import ElasticRun, eventful, life, rehearse
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.analysis.effective_time import EffectiveTime, effective_time
from orchestrator.analysis.node_time import NodeUse
from orchestrator.analysis.training_time import training_time_ratio
from orchestrator.events.rehearsed import Rehearsed
from orchestrator.events.types import Paused, RankFailed, Record, Stalled
from orchestrator.history.job_view import fold
from orchestrator.verify.ledger import audit


def measure(run: ElasticRun) -> EffectiveTime:
    found = effective_time(fold(run.records).recovery, emulated=True)
    assert found is not None
    return found


def test_each_node_second_of_an_eventful_rehearsal_is_accounted_for() -> None:
    """The window begins at 1001 with the first commit. Four nodes train until 1004. Node 2 dies at 1004.5,
    0.5 s into a step. Recovery takes 1.5 s, and three nodes train from 1006 to 1009. Node 4 came up at 1007
    and has joined by 1009.4. Four nodes train until 1012.4. Nodes 0 and 1 die 0.5 s later. The two others go
    back from step 10 to step 4 in 1.5 s and train from 1014.4 to 1022.4.
    """
    run = eventful()
    lives = (life(0, 990, 1012.9), life(1, 990, 1012.9), life(2, 990, 1004.5), life(3, 990), life(4, 1007))
    rehearse(run, lives, began_s=1001, ended_s=1022.4)
    found = measure(run)
    assert found.node_seconds == {
        NodeUse.TRAINED: pytest.approx(4 * 3 + 2 * 8),
        NodeUse.STALLED: 0,
        NodeUse.IN_FLIGHT: pytest.approx(4 * 0.5 + 4 * 0.5),
        NodeUse.RECOVERING: pytest.approx(3 * 1.5 + 4 * 0.4 + 2 * 1.5),
        NodeUse.UNDONE: pytest.approx(3 * 3 + 4 * 3),
        NodeUse.JOINING: pytest.approx(2.0),
        NodeUse.PAUSED: 0,
        NodeUse.LEAVING: 0,
        NodeUse.IDLE: 0,
    }
    assert found.live == pytest.approx(2 * 11.9 + 3.5 + 21.4 + 15.4)
    assert found.ratio == pytest.approx(28 / found.live)
    # Here all lost time is a cost per event.
    assert found.ratio_at_speed_1 == pytest.approx(1 - (found.live - 28) / 10 / found.live)
    assert (found.losses, found.joins, found.steps, found.rerun, found.steps_lost) == (3, 1, 11, 2, 6)
    assert found.lost_per_loss == pytest.approx((4 + 4.5 + 3 + 21) / 3)
    assert found.lost_per_join == pytest.approx(2 + 1.6)
    first, join, last = found.costs
    assert (first.cause, first.lost, first.members, first.at_s) == ("loss", ("slot2",), 3, pytest.approx(5))
    assert first.node_seconds == {NodeUse.IN_FLIGHT: pytest.approx(2), NodeUse.RECOVERING: pytest.approx(4.5)}
    # Dead at 1004.5, trained from 1006 on, committed at 1007.
    assert first.until_commit_s == pytest.approx(2.5)
    assert (join.cause, join.joined, join.until_commit_s) == ("join", ("slot4",), None)
    assert last.node_seconds[NodeUse.UNDONE] == pytest.approx(21)
    assert last.total_node_seconds == pytest.approx(2 + 3 + 21)
    assert found.recovery_s["detect"].max == 0.1
    assert found.recovery_s["total"].p50 == pytest.approx(1.5)
    assert found.recovery_s["commit"].max == pytest.approx(2.5)


def test_a_recovery_that_ends_after_the_window_counts_as_the_ledger_counts_it() -> None:
    run = eventful()
    lives = (life(0, 990, 1012.9), life(1, 990, 1012.9), life(2, 990, 1004.5), life(3, 990), life(4, 1007))
    # The last two nodes die in the window; the job goes back six steps after its end.
    rehearse(run, lives, began_s=1001, ended_s=1013)
    found = measure(run)
    assert (found.losses, len(found.costs), found.steps_lost) == (3, 2, 6)
    assert found.steps_lost == audit(run.records, None).superseded


def test_a_node_without_use_is_idle_and_one_with_notice_is_leaving() -> None:
    run = ElasticRun()
    run.submit()
    for rank in range(3):
        run.rank(rank)
    run.form((0, 1))
    run.train(4)
    run.regroup((0,), cause="drain", lost=(1,), parts=(0.0, 0.0, 0.0, 0.0, 0.5))
    run.train(4)
    run.finish()
    rehearse(
        run,
        (life(0, 1), life(1, 1, down_s=1007.5, noticed_s=1003), life(2, 1)),
        began_s=1001,
        ended_s=1008.5,
        speedup=2,
    )
    found = measure(run)
    # Node 1 trained until the regrouping at 1004 and stayed up until 1007.5; half a second of that was
    # recovery.
    assert found.node_seconds[NodeUse.LEAVING] == pytest.approx(3)
    assert found.node_seconds[NodeUse.IDLE] == pytest.approx(7.5)
    assert found.node_seconds[NodeUse.RECOVERING] == pytest.approx(1)
    assert found.ratio == pytest.approx((7 + 3) / 21.5)
    # At half the speed the recovery costs the same, but the wait is twice as long.
    assert found.ratio_at_speed_1 == pytest.approx((2 * 10 + 1) / 43)


def test_a_pause_is_no_recovery() -> None:
    run = ElasticRun()
    run.submit()
    run.rank(0)
    run.rank(1)
    run.form((0, 1))
    run.train(2)
    run.clock_s += 0.5
    run.put(RankFailed(rank=1, error="died"))
    run.clock_s += 0.5
    run.put(Paused(reason="too few", step=2))
    run.clock_s += 10
    run.rank(2)
    run.regroup((0, 2), cause="capacity", joined=(2,), parts=(0.2, 0.0, 0.1, 0.2, 0.2))
    run.train(1)
    run.finish()
    rehearse(run, (life(0, 1), life(1, 1, 1002.5), life(2, 1010)), began_s=1001, ended_s=1014.7)
    found = measure(run)
    assert found.node_seconds[NodeUse.PAUSED] > 0
    assert found.live == pytest.approx(13.7 + 1.5 + 4.7)


def stalled_run(*, reported_first: bool) -> ElasticRun:
    """Steps of 1 s; in the sixth rank 1 stands still for 28 s."""
    run = ElasticRun()
    run.submit()
    for rank in range(2):
        run.rank(rank)
    run.form((0, 1))
    run.train(5)
    if reported_first:
        run.clock_s += 28.5
        run.put(Stalled(rank=1, seconds=28.5))
        run.clock_s -= 28.5
        run.train(1, 29.0)
    else:
        run.train(1, 29.0)
        run.clock_s -= 0.5
        run.put(Stalled(rank=1, seconds=28.5))
        run.clock_s += 0.5
    run.train(10)
    return run


@pytest.mark.parametrize("reported_first", [True, False])
def test_a_standstill_is_lost_time_whichever_is_reported_first(reported_first: bool) -> None:
    run = stalled_run(reported_first=reported_first)
    view = fold(run.records)
    assert [commit.stalled_s for commit in view.recovery.commits if commit.stalled_s] == [28.0]
    ratio = training_time_ratio(view)
    assert ratio == pytest.approx(16 / 44)
    rehearse(run, (life(0, 990), life(1, 990)), began_s=1000, ended_s=1044)
    found = measure(run)
    assert found.node_seconds[NodeUse.STALLED] == pytest.approx(2 * 28)
    assert found.node_seconds[NodeUse.TRAINED] == pytest.approx(2 * 16)


def test_a_rank_that_answers_late_while_steps_are_as_long_as_usual_loses_no_time() -> None:
    run = ElasticRun()
    run.submit()
    run.rank(0)
    run.form((0,))
    run.train(10)
    run.put(Stalled(rank=0, seconds=4.0))
    run.train(2)
    assert training_time_ratio(fold(run.records)) == pytest.approx(1.0)


def test_ranks_that_stand_still_together_lose_the_time_once() -> None:
    run = stalled_run(reported_first=False)
    twin = [
        Record(time_s=record.time_s, event=replace(record.event, rank=0))
        for record in run.records
        if isinstance(record.event, Stalled)
    ]
    view = fold([*run.records, *twin])
    assert view.totals.stalls == 2
    assert training_time_ratio(view) == pytest.approx(16 / 44)


def test_a_step_rolled_forward_was_trained_by_the_generation_before() -> None:
    """It is committed before the loss is settled and announced after the next generation begins."""
    run = ElasticRun()
    run.submit()
    for rank in range(2):
        run.rank(rank)
    run.form((0, 1))
    run.train(2)
    run.step, run.clock_s = 3, 1003.0
    late = run.report(1.0)
    run.lose(1, after_s=0.2)
    run.regroup((0,), lost=(1,))
    run.put(late)
    run.train(1)
    rehearse(run, (life(0, 1), life(1, 1, 1003.2)), began_s=1000, ended_s=run.clock_s)
    found = measure(run)
    assert found.node_seconds[NodeUse.TRAINED] == pytest.approx(2 * 3 + 1)
    assert found.node_seconds[NodeUse.IN_FLIGHT] == pytest.approx(0.4)
    assert found.node_seconds[NodeUse.RECOVERING] == pytest.approx(1.5)


def test_a_second_loss_before_the_first_commit_is_part_of_the_same_recovery() -> None:
    run = ElasticRun()
    run.submit()
    for rank in range(3):
        run.rank(rank)
    run.form((0, 1, 2))
    run.train(1)
    run.lose(2)
    run.regroup((0, 1), lost=(2,))
    run.lose(1)
    run.regroup((0,), lost=(1,))
    run.train(1)
    rehearse(run, (life(0, 1), life(1, 1, 1003.5), life(2, 1, 1001.5)), began_s=1001, ended_s=run.clock_s)
    found = measure(run)
    assert found.node_seconds[NodeUse.IN_FLIGHT] == pytest.approx(1.5)
    assert found.node_seconds[NodeUse.TRAINED] == pytest.approx(1)
    assert found.node_seconds[NodeUse.RECOVERING] == pytest.approx(2 + 3.5)


def test_a_job_that_fails_wastes_what_is_left_of_the_trace() -> None:
    run = ElasticRun()
    run.submit()
    run.rank(0)
    run.form((0,))
    run.train(2)
    rehearse(run, (life(0, 1),), began_s=1001, ended_s=1012)
    found = measure(run)
    assert found.ratio == pytest.approx(1 / 11)
    assert found.node_seconds[NodeUse.RECOVERING] == pytest.approx(10)


def test_without_a_rehearsal_there_are_no_node_seconds() -> None:
    assert effective_time(fold(eventful().records).recovery, emulated=False) is None


@st.composite
def rehearsals(draw: st.DrawFn) -> ElasticRun:
    """Any sequence of changes at any times, replayed on nodes with any lifetimes."""
    run = ElasticRun()
    run.submit()
    ranks = list(range(draw(st.integers(1, 4))))
    for rank in ranks:
        run.rank(rank)
    run.form(tuple(ranks))
    run.train(draw(st.integers(0, 3)), draw(st.floats(0.1, 2)))
    times = st.floats(0, 1)
    for rank in range(len(ranks), len(ranks) + draw(st.integers(0, 5))):
        if draw(st.booleans()):
            run.save()
        run.lose(run.members[0], after_s=draw(times))
        if draw(st.booleans()):
            run.put(Paused(reason="", step=run.step))
            run.clock_s += draw(times)
        run.rank(rank)
        run.regroup(
            (*run.members[draw(st.integers(0, 1)) :], rank),
            cause=draw(st.sampled_from(("loss", "join", "capacity"))),
            parts=draw(st.tuples(times, times, times, times, times)),
            from_checkpoint=draw(st.booleans()),
        )
        run.train(draw(st.integers(0, 3)), draw(st.floats(0.1, 2)))
    moments = st.floats(995, run.clock_s + 5)
    lives = []
    for rank in range(draw(st.integers(0, 9))):
        up_s, down_s = sorted((draw(moments), draw(moments)))
        lives.append(
            life(
                rank,
                up_s,
                draw(st.one_of(st.none(), st.just(down_s))),
                draw(st.one_of(st.none(), moments)),
            )
        )
    began_s, ended_s = sorted((draw(moments), draw(moments)))
    rehearse(run, tuple(lives), began_s=began_s, ended_s=ended_s)
    return run


@given(rehearsals())
def test_every_live_second_counts_once(run: ElasticRun) -> None:
    rehearsed = run.records[-1].event
    assert isinstance(rehearsed, Rehearsed)
    live = 0.0
    for each in rehearsed.lives:
        up_s = max(each.up_s, rehearsed.began_s)
        down_s = rehearsed.ended_s if each.down_s is None else min(each.down_s, rehearsed.ended_s)
        live += max(0.0, down_s - up_s)
    found = measure(run)
    assert found.live == pytest.approx(live, abs=1e-6)
    assert all(seconds >= 0 for seconds in found.node_seconds.values())
    assert -1e-9 <= found.ratio <= found.ratio_at_speed_1 + 1e-9 <= 1 + 2e-9
    for use in (NodeUse.IN_FLIGHT, NodeUse.UNDONE):
        priced = sum(cost.node_seconds.get(use, 0.0) for cost in found.costs)
        assert priced <= found.node_seconds[use] + 1e-6


def test_a_rehearsal_survives_its_log() -> None:
    run = eventful()
    rehearse(run, (life(0, 990, 1012.9, noticed_s=1000), life(3, 990)), began_s=1001, ended_s=1022.4)
    record = run.records[-1]
    assert Record.from_json(record.to_json()) == record
