"""Ranks that come in: they copy the layers of their places before the generation forms, while the others train."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lifecycle_jobs import (
    Job,
    order_of,
    plan_of,
    position,
    ready,
    recovered,
    standby_report,
    switch_report,
    train,
)

from orchestrator.events import types as events
from orchestrator.events.types import Record
from orchestrator.history.job_view import JobView, fold
from orchestrator.lifecycle.effects import (
    Ask,
    AwaitCopies,
    CopyAside,
    Dismiss,
    LogRegroup,
    PlanAhead,
    Switch,
)
from orchestrator.lifecycle.states import Stopping, Training
from orchestrator.lifecycle.stimuli import (
    CommitFinished,
    CopiesOverdue,
    Departed,
    Going,
    PauseAsked,
    PlannedAhead,
    Positioned,
    RankLost,
    Reclaimed,
    Reported,
    Room,
    SaveOrStop,
    ScaleRequested,
    Start,
    TrainingEnded,
    Weighed,
)
from orchestrator.lifecycle.takeover import taken_over
from planner.arrivals import copied_ahead
from planner.plan import Plan
from planner.schedule.registry import build
from planner.shards import Piece, Shard
from workers.config import ElasticConfig
from workers.protocol.orders import Request
from workers.protocol.reports import CopiedAhead, Outcome, Parted

ORDER = order_of(3, layers=6, elastic=ElasticConfig(wait_s=60, spares=1))
TWO, THREE = plan_of(2, 6, version=2), plan_of(3, 6)
REGROUP = Ask(Request.REGROUP, 0)
NEWCOMER = 3


def lacking_one() -> Job:
    """A job that trains on ranks 0 and 1, since rank 2 has died."""
    job = train(Job(ORDER)).take(RankLost(2, "its process died", dead=True))
    job.take(*(Positioned(position(rank, 0, tuple(range(6))), 1) for rank in (0, 1)))
    job.take(*(CommitFinished(rank, 1) for rank in (0, 1)))
    return recovered(job, TWO, (0, 1))


def coming() -> Job:
    """A rank has come to that job, and is worth a regroup."""
    return lacking_one().take(Room(1), ready(NEWCOMER), Weighed(True, "it saves an hour", 1))


def planned(job: Job, then: Plan = THREE) -> PlannedAhead:
    """The answer to the newest request for a plan."""
    ahead = [effect for effect in job.without_logs if isinstance(effect, PlanAhead)][-1]
    copying = copied_ahead(ahead.now, ahead.members, then, ahead.lineup)
    return PlannedAhead(ahead.number, then, build("1f1b", then.world_size, 2, 1), copying)


def aside(job: Job) -> list[CopyAside]:
    return [effect for effect in job.without_logs if isinstance(effect, CopyAside)]


def copied(job: Job, rank: int = NEWCOMER, **changes: object) -> Reported:
    """`rank` has its copies, as it was asked last."""
    asked = aside(job)[-1]
    report = CopiedAhead(
        rank=rank,
        epoch=asked.epoch,
        change=asked.change,
        step=4,
        layers=tuple(piece.layer for piece in asked.pieces.get(rank, ())),
        bytes=1,
        seconds=0.1,
    )
    return Reported(replace(report, **changes))  # pyright: ignore[reportArgumentType]


def members_copied(job: Job) -> list[Reported]:
    """The members follow the newest plan, and have their copies."""
    plan = next(effect.plan for effect in reversed(job.without_logs) if isinstance(effect, Switch))
    places = range(plan.world_size)
    reports = [Reported(switch_report(place, plan)) for place in places]
    kept = {place: plan.standbys_of(place) for place in places}
    return [*reports, *(Reported(standby_report(place, layers)) for place, layers in kept.items() if layers)]


def regroup(job: Job, holds: dict[int, tuple[int, ...]], plan: Plan, members: tuple[int, ...]) -> None:
    number = job.has.progress.round + 1
    job.take(*(Departed(Parted(rank=rank, step=4), number - 1) for rank in job.has.membership.members))
    there = job.has.membership.alive
    job.take(*(Positioned(position(rank, 4, holds.get(rank, ())), number) for rank in sorted(there)))
    recovered(job, plan, members)


def regrouped(job: Job) -> events.Regrouped:
    return [effect.event for effect in job.without_logs if isinstance(effect, LogRegroup)][-1]


def test_a_newcomer_copies_its_layers_before_the_ranks_regroup() -> None:
    job = coming()
    assert AwaitCopies(60.0, change=1) in job.without_logs
    job.take(planned(job))
    (asked,) = aside(job)
    # Rank 0 has layers 0 to 2 and rank 1 the others; the newcomer gets the last two.
    assert asked.pieces == {NEWCOMER: {Piece(4): 1, Piece(5): 1}}
    assert (asked.epoch, asked.change, asked.generation) == (1, 1, job.has.progress.generation)
    # Layer 2 comes to rank 1, as a copy first.
    job.take(*members_copied(job))
    assert REGROUP not in job.without_logs
    job.take(copied(job))
    assert job.without_logs[-1] == REGROUP
    regroup(job, {0: (0, 1, 2), 1: (2, 3, 4, 5)}, THREE, (0, 1, NEWCOMER))
    assert (regrouped(job).cause, regrouped(job).joined, regrouped(job).fetched) == ("join", (NEWCOMER,), 0)
    assert job.has.intents.change is None


def test_members_keep_no_copies_for_a_newcomer_that_dies_as_the_ranks_regroup() -> None:
    job = coming()
    job.take(planned(job))
    job.take(*members_copied(job), copied(job))
    assert job.without_logs[-1] == REGROUP
    with_copies = job.has.progress.plan
    assert any(with_copies.standbys)
    job.take(RankLost(NEWCOMER, "its process died", dead=True))
    regroup(job, {0: (0, 1, 2), 1: (2, 3, 4, 5)}, TWO, (0, 1))
    now = job.has.progress.plan
    assert now.layers == with_copies.layers
    assert (now.standbys, now.key > with_copies.key) == (TWO.standbys, True)
    assert [event.plan for event in job.logged if isinstance(event, events.Issued)][-1] == now


def test_a_newcomer_that_needs_no_other_moves_is_waited_for_alone() -> None:
    job = coming()
    then = plan_of(3, 6)
    then = replace(then, layers=((0, 3), (3, 5), (5, 6)))
    job.take(planned(job, then))
    assert not [effect for effect in job.without_logs if isinstance(effect, Switch)]
    assert REGROUP not in job.without_logs
    job.take(copied(job))
    assert job.without_logs[-1] == REGROUP


def test_a_newcomer_is_told_what_to_build_and_so_is_each_member() -> None:
    """Where the next generation cuts layers otherwise, a rank has none of them as it will own them."""
    job = coming()
    own = {rank: tuple(Piece(layer, Shard(0, 2)) for layer in (2 * rank, 2 * rank + 1)) for rank in (0, 1)}
    building = {**own, NEWCOMER: (Piece(4, Shard(0, 2)), Piece(5, Shard(0, 2)))}
    job.take(replace(planned(job), building=building))
    (asked,) = aside(job)
    assert asked.building == {NEWCOMER: building[NEWCOMER]}
    assert {*asked.pieces} == {NEWCOMER}
    (switch,) = [effect for effect in job.without_logs if isinstance(effect, Switch)]
    assert {rank: switch.building[rank] for rank in switch.ranks} == own
    # Both members build, and one of them copies: the newcomer alone is not waited for.
    job.take(copied(job), *members_copied(job))
    assert REGROUP not in job.without_logs
    job.take(Reported(standby_report(0, ())))
    assert job.without_logs[-1] == REGROUP


def test_a_spare_that_takes_a_leaving_ranks_place_is_told_what_to_build() -> None:
    job = lacking_one().take(Room(1), ready(NEWCOMER), Weighed(False, "it costs an hour", 1))
    assert job.has.membership.idle == {NEWCOMER}
    job.take(Going(frozenset({1}), "file", 30.0, "node1", "10.0.0.1"))
    building = {NEWCOMER: tuple(Piece(layer, Shard(1, 2)) for layer in (3, 4, 5))}
    job.take(replace(planned(job, plan_of(2, 6)), building=building))
    (asked,) = aside(job)
    assert (asked.building, {*asked.pieces[NEWCOMER]}) == (building, {Piece(3), Piece(4), Piece(5)})
    assert not [effect for effect in job.without_logs if isinstance(effect, Switch)], (
        "no member lacks anything"
    )
    job.take(copied(job))
    assert job.without_logs[-1] == REGROUP


@pytest.mark.parametrize("changes", [{"change": 9}, {"epoch": 9}])
def test_copies_for_another_change_do_not_count(changes: dict[str, int]) -> None:
    job = coming()
    job.take(planned(job))
    job.take(*members_copied(job), copied(job, **changes))
    assert REGROUP not in job.without_logs


def test_a_newcomer_that_cannot_copy_fetches_its_layers_at_the_regroup() -> None:
    job = coming()
    job.take(planned(job))
    job.take(*members_copied(job), copied(job, error="the link is too slow"))
    assert job.without_logs[-1] == REGROUP
    (warned,) = [event for event in job.logged if isinstance(event, events.Warned)]
    assert warned.text == f"rank {NEWCOMER} fetches its layers while the job waits: the link is too slow"
    regroup(job, {0: (0, 1, 2), 1: (2, 3, 4, 5)}, THREE, (0, 1, NEWCOMER))
    assert regrouped(job).fetched == 2


def test_copies_that_do_not_come_in_time_are_not_waited_for() -> None:
    job = coming()
    job.take(planned(job), CopiesOverdue(change=1))
    assert job.without_logs[-1] == REGROUP
    regroup(job, {0: (0, 1, 2), 1: (3, 4, 5)}, THREE, (0, 1, NEWCOMER))
    assert regrouped(job).fetched == 3


def test_a_newcomer_that_dies_meanwhile_costs_nothing() -> None:
    job = coming()
    job.take(planned(job))
    job.take(RankLost(NEWCOMER, "its process died", dead=True))
    assert Dismiss(frozenset({NEWCOMER})) in job.without_logs
    job.take(*members_copied(job), CopiesOverdue(change=1))
    assert isinstance(job.state, Training)
    assert REGROUP not in job.without_logs
    assert job.has.intents.change is None
    # The members let go of their copies.
    last = next(effect for effect in reversed(job.without_logs) if isinstance(effect, Switch))
    assert last.plan.standbys == TWO.standbys
    assert job.has.progress.plan == last.plan


def test_who_copied_for_a_generation_that_forms_without_it_lets_go() -> None:
    """Of the generation that has formed: it hears of no other."""
    job = coming()
    job.take(planned(job))
    job.take(copied(job))
    order = aside(job)[-1]
    job.take(RankLost(1, "ValueError: not finite", round=job.has.progress.round))
    number = job.has.progress.round
    holds = {0: (0, 1, 2), 1: (3, 4, 5), NEWCOMER: ()}
    job.take(*(Positioned(position(rank, 0, of), number) for rank, of in holds.items()))
    assert aside(job)[-1] == order, "until then it may get a place"
    recovered(job, plan_of(2, 6, version=9), (0, 1))
    assert job.has.membership.idle == {NEWCOMER}
    last = aside(job)[-1]
    assert (last.pieces, last.building) == ({NEWCOMER: {}}, {})
    assert (last.epoch, last.generation) == (order.epoch, job.has.progress.generation)
    assert last.change > order.change
    assert not [effect for effect in job.without_logs if isinstance(effect, Switch)][1:], (
        "members took what they built"
    )
    job.take(Room(0))
    assert aside(job)[-1] == last


def test_a_member_that_dies_meanwhile_leaves_its_place_to_the_newcomer() -> None:
    job = coming()
    job.take(planned(job), RankLost(1, "its process died", dead=True))
    number = job.has.progress.round
    job.take(
        Positioned(position(0, 4, tuple(range(6))), number), Positioned(position(NEWCOMER, 0, ()), number)
    )
    recovered(job, plan_of(2, 6, version=9), (0, NEWCOMER))
    assert (regrouped(job).cause, regrouped(job).lost, regrouped(job).fetched) == ("loss", (1,), 3)


def test_a_stop_meanwhile_ends_the_job_without_a_regroup() -> None:
    job = coming()
    job.take(planned(job))
    job.take(SaveOrStop(Request.STOP), *members_copied(job), copied(job), CopiesOverdue(change=1))
    assert isinstance(job.state, Stopping)
    assert REGROUP not in job.without_logs


def test_a_pause_meanwhile_comes_first() -> None:
    job = coming()
    job.take(planned(job))
    job.take(PauseAsked(), *members_copied(job), copied(job), CopiesOverdue(change=1))
    assert REGROUP not in job.without_logs
    ends = [Outcome(rank=rank, step=4, stopped=True, layer_digests=()) for rank in (0, 1)]
    job.take(*(TrainingEnded(outcome, 1) for outcome in ends))
    assert not job.has.intents.pausing


def test_a_drain_meanwhile_makes_another_plan_for_the_newcomer() -> None:
    job = coming()
    first = planned(job)
    job.take(first, Going(frozenset({1}), "file", 30.0, "node1", "10.0.0.1"))
    assert isinstance(job.without_logs[-1], PlanAhead)
    assert job.without_logs[-1].lineup == (0, NEWCOMER)
    stale = copied(job)
    job.take(planned(job, plan_of(2, 6)), stale)
    assert aside(job)[-1].pieces == {NEWCOMER: {Piece(3): 1, Piece(4): 1, Piece(5): 1}}
    assert REGROUP not in job.without_logs
    job.take(copied(job))
    assert job.without_logs[-1] == REGROUP
    regroup(job, {0: (0, 1, 2), 1: (3, 4, 5)}, plan_of(2, 6), (0, NEWCOMER))
    assert (regrouped(job).cause, regrouped(job).lost, regrouped(job).fetched) == ("drain", (1,), 0)


def test_a_larger_size_on_request_copies_ahead_and_a_newer_request_cancels_it() -> None:
    job = lacking_one()
    job.take(Room(1), ready(NEWCOMER))
    job.take(ScaleRequested(events.Scaled(ranks=3, spares=0, places=3, id="s")))
    assert isinstance(job.without_logs[-1], PlanAhead | AwaitCopies)
    job.take(planned(job))
    late = copied(job)
    job.take(ScaleRequested(events.Scaled(ranks=2, spares=1, places=2, id="t")))
    # The newcomer stays as a spare, and lets go of what it has copied.
    assert job.has.membership.idle == {NEWCOMER}
    assert (aside(job)[-1].pieces, aside(job)[-1].change) == ({NEWCOMER: {}}, 2)
    job.take(*members_copied(job), late, CopiesOverdue(change=1))
    assert REGROUP not in job.without_logs


def test_a_controller_that_takes_over_has_the_newcomer_copy_again() -> None:
    before = coming()
    before.take(planned(before))
    stale = copied(before)
    submitted = events.Submitted(job="j", epoch=1, spec={}, resume=False)
    view = fold(Record(time_s=0.0, event=event) for event in [submitted, *before.logged])
    job = Job(taken_over(ORDER, JobView.from_json(view.to_json()))).take(Start())
    number = job.has.progress.round
    job.take(*(Reclaimed(rank, f"node{rank}", "h", number) for rank in (0, 1, NEWCOMER)))
    job.take(RankLost(2, "its process died", dead=True))
    assert isinstance(job.state, Training)
    job.take(Weighed(True, "it saves an hour", number))
    job.take(planned(job))
    job.take(*members_copied(job), stale)
    assert aside(job)[-1].epoch == 2
    assert REGROUP not in job.without_logs
    job.take(copied(job))
    assert job.without_logs[-1] == REGROUP
