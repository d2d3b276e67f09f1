"""Ranks that are leaving, newcomers, and waits for capacity over the life of a job."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lifecycle_jobs import (
    AT_ONCE,
    DEAD,
    THREE,
    Job,
    checkpoint_report,
    order_of,
    plan_of,
    position,
    ready,
    recovered,
    step_report,
    train,
)

from orchestrator.events import types as events
from orchestrator.lifecycle.effects import (
    Ask,
    Assess,
    Dismiss,
    LogRegroup,
    PlanAhead,
    Prepare,
    Recruit,
    Reserve,
    Wait,
    Weigh,
)
from orchestrator.lifecycle.states import Assessing, Closing, JobFailed, Training, Waiting
from orchestrator.lifecycle.stimuli import (
    CommitFinished,
    Departed,
    Going,
    Joined,
    Placed,
    PlannedAhead,
    PlanReady,
    Positioned,
    RankLoaded,
    RankLost,
    Reported,
    Room,
    SaveOrStop,
    Start,
    StoreUp,
    TrainingEnded,
    Unplannable,
    WaitOver,
    Weighed,
)
from workers.config import ElasticConfig
from workers.protocol.orders import Request
from workers.protocol.reports import NoticeReport, Outcome, Parted


def test_a_spare_takes_the_lost_ones_place() -> None:
    job = train(Job(replace(THREE, elastic=ElasticConfig(spares=1, grow=False))))
    job.take(Room(5))
    assert job.without_logs[-1] == Recruit((3,))
    job.take(ready(3), DEAD)
    for rank, holds in ((0, (0, 1)), (2, (2,)), (3, ())):
        job.take(Positioned(position(rank, 0, holds), 1))
    recovered(job, plan_of(3, version=2), (0, 3, 2))
    assert job.has.membership.members == (0, 3, 2)
    assert job.has.membership.idle == frozenset()


def test_room_for_a_spare_while_the_first_ranks_are_being_placed_is_looked_at_later() -> None:
    job = Job(replace(THREE, elastic=ElasticConfig(spares=1))).take(Start(), Room(1))
    assert job.without_logs == [Reserve((0, 1, 2))]
    job.take(Placed())
    assert job.without_logs[-1] == Prepare((0, 1, 2))


def test_too_few_ranks_wait_for_capacity() -> None:
    job = train(Job(replace(THREE, elastic=ElasticConfig(min_ranks=3, wait_s=60)))).take(DEAD)
    job.take(Positioned(position(0, 0, (0, 1)), 1), Positioned(position(2, 0, (1, 2)), 1))
    assert isinstance(job.state, Waiting)
    reason = "rank 1: its process died: 2 ranks left, and elastic.min_ranks = 3"
    assert job.logged[-1] == events.Paused(reason=reason, step=0, failures=1, failed_at=0)
    assert job.without_logs[-1] == Wait(60, 1)
    job.take(Room(4))
    assert job.without_logs[-1] == Recruit((3,))
    job.take(ready(3))
    for rank, holds in ((0, (0, 1)), (2, (1, 2)), (3, ())):
        job.take(Positioned(position(rank, 0, holds), 2))
    recovered(job, plan_of(3, version=2), (0, 3, 2))
    regrouped = next(effect.event for effect in job.without_logs if isinstance(effect, LogRegroup))
    assert (regrouped.cause, regrouped.lost, regrouped.joined) == ("capacity", (1,), (3,))
    job.take(WaitOver(1))
    assert isinstance(job.state, Training)


def test_a_wait_for_capacity_is_bounded() -> None:
    job = train(Job(THREE)).take(DEAD)
    job.take(Positioned(position(0, 0, (0, 1)), 1), Positioned(position(2, 0, (1, 2)), 1))
    job.take(CommitFinished(0, 1), CommitFinished(2, 1), Unplannable("no plan for 2 ranks: memory", 1))
    assert isinstance(job.state, Waiting)
    job.take(WaitOver(1))
    assert isinstance(job.state, Closing)
    assert isinstance(job.state.end, JobFailed)
    assert "no plan for 2 ranks: memory; no capacity came within 60 s" in job.state.end.reason


def test_ranks_that_are_to_go_hand_over_and_are_dismissed() -> None:
    job = train(Job(AT_ONCE)).take(Going(frozenset({1}), "file", 30.0, "node1", "10.0.0.1"))
    assert job.without_logs[-1] == Ask(Request.REGROUP, 0)
    notice = events.Noticed(node="node1", host="10.0.0.1", source="file", ranks=(1,), left_s=30.0)
    assert job.logged[-1] == notice
    job.take(*(Departed(Parted(rank=rank, step=4)) for rank in range(3)))
    assert job.without_logs[-1] == Assess(frozenset({0, 1, 2}), 1, 3)
    job.take(*(Positioned(position(rank, 4, (rank,)), 1) for rank in range(3)))
    recovered(job, plan_of(2, version=2), (0, 2))
    assert Dismiss(frozenset({1})) in job.without_logs
    assert job.has.membership.alive == {0, 2}
    regrouped = next(effect.event for effect in job.without_logs if isinstance(effect, LogRegroup))
    assert (regrouped.cause, regrouped.lost, regrouped.rerun) == ("drain", (1,), 0)
    assert regrouped.reason == "rank 1 goes; 2 ranks go on where there were 3"


@pytest.mark.parametrize("when", ["waiting", "assessing"])
def test_ranks_that_die_after_they_have_left_cost_no_step(when: str) -> None:
    """No step is in flight, no matter when their deaths are reported."""
    order = order_of(3, elastic=ElasticConfig(wait_s=60, min_ranks=3))
    job = train(Job(order)).take(Going(frozenset({1}), "file", 30.0, "node1", "10.0.0.1"))
    job.take(*(Reported(step_report(step, generation=3)) for step in range(1, 5)))
    job.take(*(Departed(Parted(rank=rank, step=4)) for rank in range(3)))
    job.take(*(Positioned(position(rank, 4, (rank,), began=4), 1) for rank in range(3)))
    assert isinstance(job.state, Waiting)
    job.take(Reported(checkpoint_report(4)), Room(1))
    death, newcomer = RankLost(1, "its process died", dead=True), ready(3)
    job.take(*((death, newcomer) if when == "waiting" else (newcomer, death)))
    assert isinstance(job.state, Assessing)
    holds = {0: (0,), 2: (2,), 3: ()}
    job.take(
        *(
            Positioned(position(rank, 4 if of else 0, of, began=4 if of else 0), 2)
            for rank, of in holds.items()
        )
    )
    recovered(job, plan_of(3, version=2), (0, 3, 2))
    regrouped = next(effect.event for effect in job.without_logs if isinstance(effect, LogRegroup))
    assert (regrouped.lost, regrouped.joined) == ((1,), (3,))
    assert (regrouped.step, regrouped.steps_lost, regrouped.rerun) == (4, 0, 0)


def stopped_at_2(rank: int) -> TrainingEnded:
    return TrainingEnded(Outcome(rank=rank, step=2, stopped=True, layer_digests=()))


def test_where_all_are_to_go_they_stop_with_a_checkpoint_and_the_job_pauses() -> None:
    job = train(Job(THREE)).take(Reported(step_report(1)), Going(frozenset({0, 1, 2}), "ray", 30.0))
    assert job.without_logs[-1] == Ask(Request.STOP, 0)
    saved = checkpoint_report(2)
    job.take(Reported(step_report(2)), Reported(saved), *map(stopped_at_2, range(3)))
    assert not [event for event in job.logged if isinstance(event, events.RankEnded)]
    job.take(*(Positioned(position(rank, 2, (rank,)), 1) for rank in range(3)))
    assert isinstance(job.state, Waiting)
    job.take(*(RankLost(rank, "gone", dead=True) for rank in range(3)), Room(3), *map(ready, (3, 4, 5)))
    job.take(*(Positioned(position(rank, 0, ()), 2) for rank in (3, 4, 5)))
    recovered(job, plan_of(3, version=2), (3, 4, 5))
    assert job.has.progress.step == 2
    regrouped = next(effect.event for effect in job.without_logs if isinstance(effect, LogRegroup))
    assert (regrouped.cause, regrouped.steps_lost) == ("capacity", 0)


def test_word_that_comes_while_a_rank_starts_counts_once_it_is_up() -> None:
    report = NoticeReport(rank=1, source="sigterm", left_s=None, text="SIGTERM")
    job = Job(AT_ONCE).take(Start(), Placed(), ready(0), Reported(report), ready(1), ready(2))
    job.take(PlanReady(AT_ONCE.plan, AT_ONCE.schedule), *(RankLoaded(rank, None) for rank in range(3)))
    job.take(StoreUp("h", 7), *(Joined(rank) for rank in range(3)))
    assert job.without_logs[-1] == Ask(Request.REGROUP, 0)
    assert job.has.membership.going == {1}


def test_the_signal_that_ends_a_rank_which_was_let_go_is_no_news() -> None:
    job = train(Job(THREE)).take(RankLost(2, "dismissed", dead=True))
    before = [*job.logged]
    job.take(Reported(NoticeReport(rank=2, source="sigterm", left_s=None, text="SIGTERM")))
    assert job.logged == before
    job.take(Reported(NoticeReport(rank=1, source="sigterm", left_s=None, text="SIGTERM")))
    assert [event.ranks for event in job.logged if isinstance(event, events.Noticed)] == [(1,)]


def test_the_same_word_from_two_ranks_of_a_node_is_logged_once() -> None:
    job = train(Job(THREE)).take(Going(frozenset({1}), "aws"), Going(frozenset({1}), "aws", 30.0))
    assert len([event for event in job.logged if isinstance(event, events.Noticed)]) == 1
    job.take(Going(frozenset({9}), "aws"))
    assert job.logged[-1] == events.Noticed(node="", host="", source="aws", ranks=(9,), left_s=None)


def test_a_stop_that_was_asked_for_ends_a_job_whose_ranks_are_all_to_go() -> None:
    job = train(Job(THREE)).take(Going(frozenset({0, 1, 2}), "ray", 30.0), SaveOrStop(Request.STOP))
    job.take(*map(stopped_at_2, range(3)))
    assert isinstance(job.state, Closing)


def test_a_newcomer_is_taken_in_if_it_pays() -> None:
    job = train(Job(THREE)).take(DEAD)
    job.take(Positioned(position(0, 0, (0, 1)), 1), Positioned(position(2, 0, (1, 2)), 1))
    recovered(job, plan_of(2, version=2), (0, 2)).take(Room(1), ready(3))
    weigh = Weigh(plan_of(2, version=2), (0, 2, 3), ("node0", "node2", "node3"), 0, 1)
    assert job.without_logs[-1] == weigh
    job.take(Weighed(False, "it costs more", 1))
    assert job.without_logs[-1] == weigh
    job.take(Weighed(True, "it saves an hour", 1))
    assert isinstance(job.without_logs[-1], PlanAhead)
    job.take(PlannedAhead(1))
    assert job.without_logs[-1] == Ask(Request.REGROUP, 0)
    job.take(*(Departed(Parted(rank=rank, step=4), 1) for rank in (0, 2)))
    for rank, holds in ((0, (0, 1)), (2, (2,)), (3, ())):
        job.take(Positioned(position(rank, 4, holds), 2))
    recovered(job, plan_of(3, version=3), (0, 2, 3))
    assert job.has.membership.members == (0, 2, 3)
