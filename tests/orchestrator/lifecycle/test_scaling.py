"""Another number of ranks, and a node that is to be left, on request, over the life of a job."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lifecycle_jobs import (
    AT_ONCE,
    DEAD,
    THREE,
    Job,
    order_of,
    plan_of,
    position,
    ready,
    recovered,
    step_report,
    train,
)

from orchestrator.events import types as events
from orchestrator.events.types import Record
from orchestrator.history.job_view import JobView, fold
from orchestrator.lifecycle.effects import Ask, AwaitRanks, Dismiss, LogRegroup, PlanAhead, Recruit, Weigh
from orchestrator.lifecycle.migration import RequestedMove
from orchestrator.lifecycle.states import TargetSize, Training, Waiting
from orchestrator.lifecycle.stimuli import (
    CommitFinished,
    CopiesOverdue,
    Departed,
    Going,
    Migrate,
    Positioned,
    RankLost,
    RanksOverdue,
    Reclaimed,
    Reported,
    Room,
    SaveOrStop,
    ScaleRequested,
    Start,
)
from orchestrator.lifecycle.takeover import taken_over
from planner.search.layer_move import with_layers
from workers.config import ElasticConfig
from workers.protocol.orders import Request
from workers.protocol.reports import Parted

QUIET = order_of(3, elastic=ElasticConfig(wait_s=60, grow=False))


def scale(places: int, spares: int = 0, id: str = "s") -> ScaleRequested:
    return ScaleRequested(events.Scaled(ranks=places, spares=spares, places=places, id=id))


def regroup(job: Job, places: int, members: tuple[int, ...], *, there: tuple[int, ...]) -> None:
    """The ranks leave at a commit, and a generation of `members` forms; `there`: all that are up."""
    before = job.has.progress.round
    job.take(*(Departed(Parted(rank=rank, step=4), before) for rank in job.has.membership.members))
    held = {rank: (place,) for place, rank in enumerate(job.has.membership.members)}
    if len(held) < 3:
        held = dict.fromkeys(held, (0, 1, 2))
    job.take(*(Positioned(position(rank, 4, held.get(rank, ())), before + 1) for rank in there))
    recovered(job, plan_of(places, version=before + 2), members)


def coming(job: Job) -> tuple[int, ...]:
    """The ranks for which the newest plan is made ahead, by place."""
    ahead = job.without_logs[-1] if isinstance(job.without_logs[-1], PlanAhead) else job.without_logs[-2]
    assert isinstance(ahead, PlanAhead)
    return ahead.lineup


def answers(job: Job) -> dict[str, tuple[bool, str]]:
    told = [event for event in job.logged if isinstance(event, events.Answered)]
    return {event.id: (event.done, event.text) for event in told}


def regroupings(job: Job) -> list[events.Regrouped]:
    return [effect.event for effect in job.without_logs if isinstance(effect, LogRegroup)]


def test_fewer_ranks_are_left_at_a_commit_and_the_others_are_released() -> None:
    job = train(Job(AT_ONCE)).take(scale(2))
    assert job.without_logs[-1] == Ask(Request.REGROUP, 0)
    assert answers(job) == {}
    regroup(job, 2, (0, 1), there=(0, 1, 2))
    assert answers(job) == {"s": (True, "trains on with 2 ranks")}
    assert Dismiss(frozenset({2})) in job.without_logs
    (regrouped,) = regroupings(job)
    assert (regrouped.cause, regrouped.lost, regrouped.steps_lost) == ("scale", (2,), 0)
    assert regrouped.reason == "rank 2 goes; 2 ranks go on where there were 3"
    # It does not grow back.
    job.take(Room(4))
    assert not [effect for effect in job.without_logs if isinstance(effect, Recruit)]


def test_a_released_rank_stays_where_a_spare_is_wanted() -> None:
    job = train(Job(THREE)).take(scale(2, spares=1))
    regroup(job, 2, (0, 1), there=(0, 1, 2))
    assert job.has.membership.idle == {2}
    (regrouped,) = regroupings(job)
    assert regrouped.lost == ()
    job.take(scale(2, id="none"))
    assert job.without_logs[-1] == Dismiss(frozenset({2}))
    assert events.Dismissed(ranks=(2,)) in job.logged
    assert answers(job)["none"] == (True, "keeps 0 spare ranks from now on")


def test_more_ranks_come_once_all_are_up_whether_or_not_it_pays() -> None:
    job = train(Job(QUIET)).take(scale(5), Room(1), ready(3))
    assert [effect for effect in job.without_logs if isinstance(effect, Recruit)] == [Recruit((3,))]
    assert job.has.intents.asked is None
    job.take(Room(7))
    assert job.without_logs[-1] == Recruit((4,))
    job.take(ready(4))
    assert coming(job) == (0, 1, 2, 3, 4)
    job.take(CopiesOverdue(change=1))
    assert job.without_logs[-1] == Ask(Request.REGROUP, 0)
    assert not [effect for effect in job.without_logs if isinstance(effect, Weigh)]
    regroup(job, 3, (0, 1, 2), there=(0, 1, 2, 3, 4))
    done, told = answers(job)["s"]
    assert not done
    assert told == "trains on with 3 ranks: the plan for 5 ranks has places for 3"
    assert job.has.intents.scaling is None


def test_ranks_that_do_not_come_in_time_leave_the_job_as_it_was() -> None:
    job = train(Job(QUIET)).take(
        replace(scale(3, spares=1, id="0"), resizes=False), scale(6), Room(1), ready(3)
    )
    assert [each for each in job.without_logs if isinstance(each, AwaitRanks)] == [AwaitRanks(60.0, "s")]
    job.take(Room(1), RanksOverdue("0"))
    assert "s" not in answers(job)
    job.take(RanksOverdue("s"))
    done, why = answers(job)["s"]
    assert not done
    assert why.startswith("4 of 6 ranks were up after 60 s (elastic.wait_s, at least 60)")
    assert job.has.membership.size == TargetSize(places=3, spares=1)
    assert job.has.intents.scaling is None
    assert events.Scaled(ranks=3, spares=1, places=3) in job.logged
    # The one that is still starting becomes the spare; nobody else is recruited.
    job.take(ready(4), Room(4))
    assert Dismiss(frozenset({3})) in job.without_logs
    assert job.has.membership.idle == {4}
    assert [effect for effect in job.without_logs if isinstance(effect, Recruit)] == [
        Recruit((3,)),
        Recruit((4,)),
    ]


def test_ranks_that_are_about_to_take_their_places_are_not_given_up() -> None:
    job = train(Job(QUIET)).take(scale(4), Room(1), ready(3), RanksOverdue("s"))
    assert coming(job) == (0, 1, 2, 3)
    assert job.without_logs[-1] == AwaitRanks(60.0, "s")
    job.take(CopiesOverdue(change=1), RanksOverdue("s"))
    assert job.has.intents.asked == "scale"
    assert job.without_logs[-1] == AwaitRanks(60.0, "s")
    regroup(job, 4, (0, 1, 2, 3), there=(0, 1, 2, 3))
    count = len(job.effects)
    assert job.take(RanksOverdue("s")).effects[count:] == []
    assert answers(job) == {"s": (True, "trains on with 4 ranks")}


def test_a_scale_whose_controller_was_replaced_gives_up_too() -> None:
    order = replace(QUIET, earlier=None)
    job = train(Job(order)).take(scale(5))
    view = fold(Record(time_s=0.0, event=event) for event in [submitted(), *job.logged])
    after = Job(taken_over(order, view)).take(Start())
    after.take(*(Reclaimed(rank, f"node{rank}", "h", after.has.progress.round) for rank in range(3)))
    after.take(scale(5), RanksOverdue("s"))
    assert not answers(after)["s"][0]
    assert after.has.membership.size == TargetSize(places=3, spares=0)


def test_spares_take_new_places_at_once() -> None:
    job = train(Job(replace(QUIET, elastic=ElasticConfig(spares=1, grow=False))))
    job.take(Room(1), ready(3), scale(4, spares=1))
    assert coming(job) == (0, 1, 2, 3)


def test_a_loss_meanwhile_counts_with_the_new_size() -> None:
    job = train(Job(THREE)).take(scale(2), DEAD)
    job.take(*(Positioned(position(rank, 0, (0, 1, 2)), 1) for rank in (0, 2)))
    recovered(job, plan_of(2, version=2), (0, 2))
    assert answers(job) == {"s": (True, "trains on with 2 ranks")}
    assert regroupings(job)[0].cause == "loss"


def test_a_later_request_takes_the_place_of_an_earlier_one() -> None:
    job = train(Job(QUIET)).take(scale(5, id="1"), scale(3, id="2"))
    assert answers(job) == {
        "1": (False, "another scale took its place"),
        "2": (True, "keeps 0 spare ranks from now on"),
    }


def test_the_size_outlives_the_controller() -> None:
    before = train(Job(AT_ONCE)).take(scale(2, spares=1))
    view = fold(Record(time_s=0.0, event=event) for event in [submitted(), *before.logged])
    order = taken_over(AT_ONCE, JobView.from_json(view.to_json()))
    assert order.earlier is not None
    assert order.earlier.membership.size == TargetSize(places=2, spares=1)
    job = Job(order).take(Start(), scale(2, spares=1))
    number = job.has.progress.round
    job.take(*(Reclaimed(rank, f"node{rank}", "h", number) for rank in range(3)))
    assert isinstance(job.state, Training)
    assert Ask(Request.REGROUP, 0) in job.without_logs


def submitted() -> events.Submitted:
    return events.Submitted(job="j", epoch=1, spec={}, resume=False)


def test_a_requested_drain_is_done_when_the_node_has_no_rank_any_more() -> None:
    job = train(Job(AT_ONCE))
    job.take(Going(frozenset({1}), "request", 30.0, "node1", "10.0.0.1", id="d"))
    assert job.without_logs[-1] == Ask(Request.REGROUP, 0)
    # A notice from elsewhere for the same node changes nothing.
    job.take(Going(frozenset({1}), "ray", 10.0, "node1", "10.0.0.1"))
    again = Going(frozenset({1}), "request", 30.0, "node1", "10.0.0.1", id="again")
    job.take(again)
    assert answers(job) == {}
    regroup(job, 2, (0, 2), there=(0, 1, 2))
    gone = (True, "node node1 has no rank of the job any more")
    assert answers(job) == {"d": gone, "again": gone}
    notice = events.Noticed(node="node1", host="10.0.0.1", source="request", ranks=(1,), left_s=30.0)
    told = [event for event in job.logged if isinstance(event, events.Noticed)]
    assert told == [replace(notice, id="d"), replace(notice, id="again")]


def test_a_drain_of_idle_ranks_is_done_at_once() -> None:
    job = train(Job(replace(QUIET, elastic=ElasticConfig(spares=1, grow=False)))).take(Room(1), ready(3))
    job.take(Going(frozenset({3}), "request", 30.0, "node3", "10.0.0.3", id="d"))
    assert answers(job)["d"][0]
    assert job.without_logs[-1] == Dismiss(frozenset({3}))


GONE = (True, "node node3 has no rank of the job any more")


def drain_of(rank: int) -> Going:
    return Going(frozenset({rank}), "request", 30.0, "node3", "10.0.0.3", id="d")


def test_a_drain_whose_ranks_are_gone_already_is_done_at_once() -> None:
    job = train(Job(QUIET)).take(drain_of(3))
    assert answers(job) == {"d": GONE}
    assert job.has.intents.leaving == ()


def test_a_drain_is_done_when_its_last_rank_dies_by_itself() -> None:
    job = train(Job(order_of(3, elastic=ElasticConfig(wait_s=60, min_ranks=3)))).take(DEAD)
    job.take(*(Positioned(position(rank, 0, (0, 1, 2)), 1) for rank in (0, 2)), drain_of(2))
    assert isinstance(job.state, Waiting)
    assert answers(job) == {}
    job.take(RankLost(2, "its process died", dead=True))
    assert answers(job) == {"d": GONE}


def test_a_drained_rank_that_is_starting_ends_at_once() -> None:
    job = train(Job(replace(QUIET, elastic=ElasticConfig(spares=1, grow=False)))).take(Room(1), drain_of(3))
    assert job.without_logs[-1] == Dismiss(frozenset({3}))
    assert answers(job) == {"d": GONE}
    job.take(ready(3))
    assert 3 not in job.has.membership.alive
    # Its place as a spare is free for another.
    job.take(Room(1))
    assert job.without_logs[-1] == Recruit((4,))


def lacking_one() -> Job:
    """A job that trains on two of its three ranks, and does not grow."""
    job = train(Job(QUIET)).take(DEAD)
    job.take(*(Positioned(position(rank, 0, (0, 1, 2)), 1) for rank in (0, 2)))
    return recovered(job, plan_of(2, version=2), (0, 2))


def test_other_spares_bring_no_missing_rank_back() -> None:
    job = lacking_one().take(replace(scale(3, spares=1), resizes=False))
    assert answers(job) == {"s": (True, "keeps 1 spare rank from now on")}
    assert job.has.membership.size == TargetSize(places=3, spares=1)
    job.take(Room(2), ready(3))
    assert [effect for effect in job.without_logs if isinstance(effect, Recruit)] == [Recruit((3,))]
    assert job.has.membership.idle == {3}
    assert Ask(Request.REGROUP, 0) not in job.without_logs


def test_other_spares_leave_a_scale_under_way_as_it_is() -> None:
    job = train(Job(QUIET)).take(scale(4, id="1"), replace(scale(4, spares=1, id="2"), resizes=False))
    assert answers(job) == {"2": (True, "keeps 1 spare rank from now on")}
    assert job.has.intents.scaling is not None
    assert job.has.intents.scaling.id == "1"


def test_a_stop_outruns_a_scale() -> None:
    job = train(Job(THREE)).take(SaveOrStop(Request.STOP), scale(2))
    assert Ask(Request.REGROUP, 0) not in job.without_logs


@pytest.mark.parametrize("first", ["scaled", "moved"])
def test_a_move_that_stops_the_ranks_is_answered_when_others_regroup_in_its_place(first: str) -> None:
    """The ranks that were to follow the move's plan are not those that go on."""
    plan = with_layers(plan_of(3, 6), 1, 2, 1)
    job = train(Job(replace(QUIET, plan=plan_of(3, 6))))
    move = RequestedMove(plan=plan, schedule=QUIET.schedule, mode="stop", asked_s=0.0, id="m")
    job.take(*((Migrate(move), scale(2)) if first == "moved" else (scale(2), Migrate(move))))
    if first == "scaled":
        assert not answers(job)["m"][0]
        return
    number = job.has.progress.round
    job.take(*(Departed(Parted(rank=rank, step=4), number) for rank in range(3)))
    job.take(*(Positioned(position(rank, 4, tuple(range(6))), number + 1) for rank in range(3)))
    job.take(*(CommitFinished(rank, number + 1) for rank in range(3)))
    done, why = answers(job)["m"]
    assert not done
    assert "cancelled: other ranks regrouped than those it was for" in why
    assert job.has.intents.migration is None


def test_a_move_that_stops_the_ranks_is_done_if_they_fail_right_after_it() -> None:
    job = train(Job(replace(QUIET, plan=plan_of(3, 6))))
    plan = with_layers(plan_of(3, 6), 1, 2, 1)
    job.take(Migrate(RequestedMove(plan=plan, schedule=QUIET.schedule, mode="stop", asked_s=0.0, id="m")))
    job.take(Reported(step_report(1, generation=3)))
    number = job.has.progress.round
    job.take(*(Departed(Parted(rank=rank, step=1), number) for rank in range(3)))
    job.take(*(Positioned(position(rank, 1, tuple(range(6))), number + 1) for rank in range(3)))
    recovered(job, plan, (0, 1, 2))
    assert answers(job) == {}
    job.take(replace(DEAD, round=job.has.progress.round))
    assert answers(job) == {"m": (True, "moved")}
