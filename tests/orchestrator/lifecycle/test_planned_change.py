"""Ranks that leave with notice, and other planned changes: copies come first, then the ranks regroup."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lifecycle_jobs import (
    Job,
    order_of,
    plan_of,
    position,
    recovered,
    standby_report,
    step_report,
    switch_report,
    train,
)

from orchestrator.events import types as events
from orchestrator.events.types import Record
from orchestrator.history.job_view import fold
from orchestrator.lifecycle.effects import Ask, AwaitCopies, LogRegroup, MakePlan, PlanAhead, Switch
from orchestrator.lifecycle.migration import RequestedMove
from orchestrator.lifecycle.states import Intents
from orchestrator.lifecycle.stimuli import (
    CopiesOverdue,
    Departed,
    Going,
    Migrate,
    PlannedAhead,
    Positioned,
    RankLost,
    Reported,
    ScaleRequested,
)
from planner.arrivals import copied_ahead
from planner.plan import Plan
from planner.schedule.registry import build
from planner.search.layer_move import with_layers
from planner.shards import Piece, Shard
from workers.config import ElasticConfig
from workers.protocol.orders import Request
from workers.protocol.reports import Parted, StandbyReport

ORDER = order_of(3, layers=6, elastic=ElasticConfig(wait_s=60, grow=False))
NOTICE = Going(frozenset({1}), "file", 30.0, "node1", "10.0.0.1")
THEN = plan_of(2, 6)
REGROUP = Ask(Request.REGROUP, 0)


def planned(job: Job, then: Plan = THEN, **changes: object) -> PlannedAhead:
    """The answer to the newest request for a plan."""
    ahead = [effect for effect in job.without_logs if isinstance(effect, PlanAhead)][-1]
    copying = copied_ahead(ahead.now, ahead.members, then, ahead.lineup)
    answer = PlannedAhead(ahead.number, then, build("1f1b", then.world_size, 2, 1), copying)
    return replace(answer, **changes)  # pyright: ignore[reportArgumentType]


def copying(job: Job) -> Plan:
    """The newest plan that gives ranks copies."""
    return next(effect.plan for effect in reversed(job.without_logs) if isinstance(effect, Switch))


def followed(job: Job) -> list[Reported]:
    """All ranks follow the newest plan, and those with copies have them."""
    plan = copying(job)
    reports: list[Reported] = [Reported(switch_report(place, plan)) for place in range(3)]
    for place in range(3):
        if layers := plan.standbys_of(place):
            reports.append(Reported(standby_report(place, layers)))
    return reports


def regroup(
    job: Job, holds: dict[int, tuple[int, ...]], plan: Plan, members: tuple[int, ...]
) -> events.Regrouped:
    number = job.has.progress.round + 1
    job.take(*(Departed(Parted(rank=rank, step=4), number - 1) for rank in range(3)))
    job.take(*(Positioned(position(rank, 4, of), number) for rank, of in holds.items()))
    recovered(job, plan, members)
    return next(effect.event for effect in job.without_logs if isinstance(effect, LogRegroup))


def test_a_drain_with_notice_copies_layers_before_the_ranks_regroup() -> None:
    job = train(Job(ORDER)).take(NOTICE)
    assert AwaitCopies(15.0, frozenset({1})) in job.without_logs
    assert job.without_logs[-1] == PlanAhead(
        now=ORDER.plan,
        members=(0, 1, 2),
        lineup=(0, 2),
        domains={rank: f"node{rank}" for rank in range(3)},
        reason="rank 1 goes; 2 ranks go on where there were 3",
        number=1,
    )
    job.take(planned(job))
    # Layers 2 and 3 leave with rank 1.
    assert copying(job).standbys == ((), (), (0,), (2,), (), ())
    assert copying(job).layers == ORDER.plan.layers
    *others, last = followed(job)
    job.take(*others)
    assert REGROUP not in job.without_logs
    job.take(last)
    assert job.without_logs[-1] == REGROUP
    regrouped = regroup(job, {0: (0, 1, 2), 1: (2, 3), 2: (3, 4, 5)}, THEN, (0, 2))
    assert (regrouped.cause, regrouped.lost, regrouped.fetched) == ("drain", (1,), 0)
    assert not [effect for effect in job.without_logs if isinstance(effect, MakePlan)][1:], (
        "the plan was made ahead"
    )
    assert job.has.progress.plan.layers == THEN.layers
    assert job.has.intents.change is None


def test_a_copy_from_before_the_change_does_not_count() -> None:
    job = train(Job(ORDER)).take(NOTICE)
    job.take(planned(job))
    job.take(Reported(standby_report(0, (2,))), Reported(standby_report(2, (3,))))
    job.take(*(Reported(switch_report(place, copying(job))) for place in range(3)))
    # All have passed the commit of the switch only after it, and reported on by the plan before.
    job.take(*(Reported(standby_report(place, (), step=1)) for place in range(3)))
    assert REGROUP not in job.without_logs
    job.take(*(one for one in followed(job) if isinstance(one.report, StandbyReport)))
    assert job.without_logs[-1] == REGROUP


@pytest.mark.parametrize(("left_s", "step_s"), [(1.0, 0.1), (30.0, 8.0)])
def test_with_a_short_notice_the_ranks_regroup_at_once(left_s: float, step_s: float) -> None:
    job = train(Job(ORDER)).take(Reported(replace(step_report(1, generation=3), step_s=step_s)))
    job.take(replace(NOTICE, left_s=left_s))
    assert job.without_logs[-1] == REGROUP
    regrouped = regroup(job, {0: (0, 1), 1: (2, 3), 2: (4, 5)}, THEN, (0, 2))
    assert (regrouped.cause, regrouped.fetched) == ("drain", 2)


def test_copies_that_do_not_come_in_time_are_fetched_at_the_regroup() -> None:
    job = train(Job(ORDER)).take(NOTICE)
    job.take(planned(job), CopiesOverdue(frozenset({1})))
    assert job.without_logs[-1] == REGROUP
    regrouped = regroup(job, {0: (0, 1, 2), 1: (2, 3), 2: (4, 5)}, THEN, (0, 2))
    assert regrouped.fetched == 1


def test_where_copies_do_not_fit_the_ranks_regroup_and_the_log_says_why() -> None:
    job = train(Job(ORDER)).take(NOTICE)
    job.take(planned(job, copying=None, why="place 0 would need 9 bytes"))
    assert job.without_logs[-1] == REGROUP
    (warned,) = [event for event in job.logged if isinstance(event, events.Warned)]
    assert warned.text == (
        "layers are fetched while the job waits, and not copied ahead: place 0 would need 9 bytes"
    )


def test_where_all_is_at_hand_the_ranks_regroup_with_the_plan() -> None:
    there = replace(ORDER.plan, standbys=((), (), (0,), (2,), (), ()))
    job = train(Job(replace(ORDER, plan=there))).take(NOTICE)
    job.take(planned(job))
    assert job.without_logs[-1] == REGROUP
    assert not [effect for effect in job.without_logs if isinstance(effect, Switch)]


def test_a_rank_that_dies_meanwhile_voids_the_change() -> None:
    job = train(Job(ORDER)).take(NOTICE)
    job.take(planned(job), RankLost(0, "its process died", dead=True))
    job.take(Positioned(position(1, 4, (0, 1, 2, 3)), 1), Positioned(position(2, 4, (3, 4, 5)), 1))
    recovered(job, plan_of(1, 6, version=5), (2,))
    regrouped = next(effect.event for effect in job.without_logs if isinstance(effect, LogRegroup))
    assert (regrouped.cause, regrouped.lost, regrouped.steps_lost) == ("loss", (0, 1), 0)
    assert job.has.membership.alive == {2}


def test_a_second_notice_before_the_copies_are_there_makes_another_plan() -> None:
    job = train(Job(ORDER)).take(NOTICE)
    first = planned(job)
    job.take(first, Going(frozenset({2}), "file", 30.0, "node2", "10.0.0.2"))
    assert isinstance(job.without_logs[-1], PlanAhead)
    assert job.without_logs[-1].lineup == (0,)
    # Answers for the first one are stale.
    job.take(first, *followed(job))
    assert REGROUP not in job.without_logs
    job.take(planned(job, plan_of(1, 6)))
    job.take(*followed(job))
    assert job.without_logs[-1] == REGROUP


def test_a_second_notice_does_not_void_a_change_whose_copies_are_there() -> None:
    """It is finished: then comes the next one."""
    job = train(Job(ORDER)).take(NOTICE)
    job.take(planned(job))
    job.take(*followed(job))
    assert job.without_logs[-1] == REGROUP
    job.take(Going(frozenset({2}), "file", 30.0, "node2", "10.0.0.2"))
    assert job.without_logs[-2:] == [REGROUP, AwaitCopies(15.0, frozenset({2}))]
    regrouped = regroup(job, {0: (0, 1, 2), 1: (2, 3), 2: (3, 4, 5)}, THEN, (0, 2))
    assert (regrouped.lost, regrouped.fetched) == ((1,), 0)
    assert isinstance(job.without_logs[-1], PlanAhead)
    assert job.without_logs[-1].lineup == (0,)


def test_a_move_under_way_is_finished_before_a_change_begins() -> None:
    moved = with_layers(ORDER.plan, 2, 3, 0)
    job = train(Job(ORDER)).take(
        Migrate(RequestedMove(plan=moved, schedule=ORDER.schedule, mode="live", asked_s=0.0))
    )
    job.take(*(Reported(switch_report(place, copying(job))) for place in range(3)), NOTICE)
    assert not [effect for effect in job.without_logs if isinstance(effect, PlanAhead)]
    job.take(*(Reported(switch_report(place, copying(job))) for place in range(3)))
    assert [event.layers for event in job.logged if isinstance(event, events.Migrated)] == [(2,)]
    assert isinstance(job.without_logs[-1], PlanAhead)
    assert job.without_logs[-1].now.layers == moved.layers


def test_a_move_does_not_begin_during_a_change() -> None:
    job = train(Job(ORDER)).take(ScaleRequested(events.Scaled(ranks=2, spares=0, places=2, id="s")))
    assert isinstance(job.without_logs[-1], PlanAhead)
    moved = with_layers(ORDER.plan, 2, 3, 0)
    job.take(Migrate(RequestedMove(plan=moved, schedule=ORDER.schedule, mode="live", asked_s=0.0)))
    assert isinstance(job.logged[-1], events.Warned)
    assert "about to regroup" in job.logged[-1].text


def test_fewer_ranks_on_request_take_copies_first_and_a_newer_request_cancels_it() -> None:
    job = train(Job(ORDER)).take(ScaleRequested(events.Scaled(ranks=2, spares=0, places=2, id="s")))
    assert AwaitCopies(60.0, change=1) in job.without_logs
    job.take(planned(job))
    job.take(ScaleRequested(events.Scaled(ranks=3, spares=0, places=3, id="t")))
    job.take(*followed(job), CopiesOverdue(change=1))
    assert REGROUP not in job.without_logs


def test_copies_count_before_what_their_rank_builds_is_there() -> None:
    job = train(Job(ORDER)).take(NOTICE)
    job.take(planned(job, building={0: (Piece(2, Shard(0, 2)),)}))
    *switched, first, second = followed(job)
    assert isinstance(first.report, StandbyReport)
    job.take(*switched, second, Reported(replace(first.report, built=False)))
    assert REGROUP not in job.without_logs
    view = fold(Record(time_s=0.0, event=event) for event in job.logged)
    assert view.ranks.copied[0] == (Piece(2),)
    job.take(Reported(standby_report(0, (), step=3)))
    assert job.without_logs[-1] == REGROUP


def test_a_change_that_is_cancelled_leaves_no_copies_and_no_modules() -> None:
    """The ranks follow the plan from before it again, whether or not all of them have come to the one with copies."""
    for reached in (0, 2, 3):
        job = train(Job(ORDER)).take(ScaleRequested(events.Scaled(ranks=2, spares=0, places=2, id="s")))
        job.take(planned(job, building={0: (Piece(2, Shard(0, 2)),)}))
        with_copies = copying(job)
        job.take(*(Reported(switch_report(place, with_copies)) for place in range(reached)))
        job.take(ScaleRequested(events.Scaled(ranks=3, spares=0, places=3, id="t")))
        switch = next(effect for effect in reversed(job.without_logs) if isinstance(effect, Switch))
        assert switch.plan.same_work_as(ORDER.plan)
        assert (switch.plan.standbys, switch.building, switch.ranks) == (ORDER.plan.standbys, {}, (0, 1, 2))
        assert switch.plan.key > with_copies.key
        assert job.logged[-1] == events.Issued(plan=switch.plan)
        # It is said once.
        job.take(
            *(Reported(switch_report(place, switch.plan)) for place in range(3)), CopiesOverdue(change=1)
        )
        assert switch == next(effect for effect in reversed(job.without_logs) if isinstance(effect, Switch))
        assert job.has.progress.plan == switch.plan
        # The next change counts on none of those copies.
        job.take(NOTICE)
        job.take(planned(job))
        assert copying(job).standbys == ((), (), (0,), (2,), (), ())
        job.take(*followed(job))
        assert job.without_logs[-1] == REGROUP


def test_what_was_built_for_a_change_that_another_replaces_goes_with_the_next_plan() -> None:
    """Also where that needs neither copies nor modules."""
    there = replace(ORDER.plan, standbys=((), (), (0,), (2,), (), ()))
    job = train(Job(replace(ORDER, plan=there))).take(NOTICE)
    job.take(planned(job, building={2: (Piece(3, Shard(0, 2)),)}))
    first = copying(job)
    job.take(Going(frozenset({2}), "file", 30.0, "node2", "10.0.0.2"))
    assert copying(job) is first, "copies stay until the next plan is known"
    job.take(planned(job, plan_of(1, 6), copying=there))
    switch = next(effect for effect in reversed(job.without_logs) if isinstance(effect, Switch))
    assert switch.building == {}
    assert switch.plan.key > first.key
    assert REGROUP not in job.without_logs
    job.take(*(Reported(switch_report(place, switch.plan)) for place in range(3)))
    assert job.without_logs[-1] == REGROUP


def test_ranks_regroup_once_each_has_built_what_it_will_own() -> None:
    """Copies are there already, but no modules for them."""
    job = train(Job(ORDER)).take(NOTICE)
    building = {0: (Piece(2, Shard(0, 2)),), 2: (Piece(3, Shard(0, 2)),)}
    job.take(planned(job, copying=job.has.progress.plan, building=building))
    switch = next(effect for effect in reversed(job.without_logs) if isinstance(effect, Switch))
    assert switch.building == building
    assert switch.plan.same_work_as(ORDER.plan)
    job.take(*(Reported(switch_report(place, switch.plan)) for place in range(3)))
    job.take(Reported(standby_report(0, ())))
    assert REGROUP not in job.without_logs
    job.take(Reported(standby_report(2, ())))
    assert job.without_logs[-1] == REGROUP


def test_where_memory_is_short_ranks_build_while_they_wait() -> None:
    job = train(Job(ORDER)).take(NOTICE)
    job.take(planned(job, why="place 0 would need 9 bytes"))
    text = "layers are built while the job waits, and not beside training: place 0 would need 9 bytes"
    assert events.Warned(text=text) in job.logged
    assert copying(job).standbys == ((), (), (0,), (2,), (), ())
    job.take(*followed(job))
    assert job.without_logs[-1] == REGROUP


def test_a_move_that_ends_with_its_generation_leaves_no_copies() -> None:
    job = train(Job(ORDER))
    plan = with_layers(ORDER.plan, 2, 3, 0)
    move = RequestedMove(
        plan=plan, schedule=ORDER.schedule, mode="live", asked_s=0.0, base=ORDER.plan, id="m"
    )
    job.take(Migrate(move))
    with_copies = copying(job)
    assert with_copies.standbys == ((), (), (0,), (), (), ())
    job.take(*(Reported(switch_report(place, with_copies)) for place in range(3)))
    assert job.has.progress.plan == with_copies
    job.take(RankLost(1, "its connection broke", cut_off=True, round=job.has.progress.round))
    number = job.has.progress.round
    job.take(*(Positioned(position(rank, 0, (2 * rank, 2 * rank + 1)), number) for rank in range(3)))
    recovered(job, plan, (0, 1, 2))
    now = job.has.progress.plan
    assert now.same_work_as(ORDER.plan)
    assert (now.standbys, now.key > with_copies.key) == (ORDER.plan.standbys, True)
    assert job.has.intents == Intents()
