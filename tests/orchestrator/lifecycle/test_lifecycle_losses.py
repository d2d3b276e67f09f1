"""What a job does when it loses ranks or a step fails, driven by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lifecycle_jobs import (
    CUT_OFF,
    DAMAGE,
    DEAD,
    PLAN,
    PLANNED,
    THREE,
    Job,
    checkpoint_report,
    order_of,
    outcome,
    plan_of,
    position,
    ready,
    recovered,
    step_report,
    train,
)

from orchestrator.events import types as events
from orchestrator.lifecycle.effects import Ask, Assess, FinishCommit, Follow, LogRegroup, MakePlan
from orchestrator.lifecycle.recovery import Handover
from orchestrator.lifecycle.states import (
    Assessing,
    Closing,
    FinishingCommit,
    Hosting,
    JobFailed,
    Joining,
    Loading,
    Planning,
    Stopping,
    Training,
    Waiting,
)
from orchestrator.lifecycle.stimuli import (
    CommitFinished,
    Departed,
    Joined,
    PlanReady,
    Positioned,
    RankLoaded,
    RankLost,
    Reported,
    Room,
    SaveOrStop,
    Stimulus,
    StoreUp,
    TrainingEnded,
)
from planner.schedule.registry import build
from planner.shards import Piece
from workers.config import ElasticConfig
from workers.control.records_digest import vector_sha256
from workers.protocol.errors import DamagedCheckpoint
from workers.protocol.orders import CheckpointRef, CommitOutcome, Request, StateSource
from workers.protocol.reports import Parted, SnapshotHeld, StepReport


def test_a_lost_rank_is_recovered_onto_the_survivors() -> None:
    job = train(Job(THREE)).take(Reported(step_report(1)), CUT_OFF, DEAD)
    assert [effect for effect in job.without_logs if isinstance(effect, Assess)] == [
        Assess(frozenset({0, 1, 2}), 1, 3)
    ]
    assert job.logged[-1] == events.RankFailed(rank=1, error="its process died")
    job.take(Positioned(position(0, 1, (0, 1)), 1), Positioned(position(2, 1, (2,), began=2, undecided=2), 1))
    assert job.without_logs[-1] == FinishCommit(frozenset({0, 2}), CommitOutcome(step=1, reported=1), 1)
    job.take(CommitFinished(0, 1), CommitFinished(2, 1))
    make = job.without_logs[-1]
    assert isinstance(make, MakePlan)
    assert (make.recovery_plan.lineup, make.first, make.version) == ((0, 2), None, 2)
    assert make.domains == {0: "node0", 2: "node2"}
    shrunk = plan_of(2, version=2)
    recovered(job, shrunk, (0, 2))
    assert isinstance(job.state, Training)
    assert job.has.membership.members == (0, 2)
    follow = [effect for effect in job.without_logs if isinstance(effect, Follow)][-1]
    assert {rank: each.place for rank, each in follow.assignments.items()} == {0: 0, 2: 1}
    assert follow.assignments[2].step == 1
    # Each rank is told where the layers are that it will own.
    assert follow.assignments[0].sources == (StateSource(layer=0, rank=0, host="10.0.0.0", port=50),)
    assert follow.assignments[2].sources == (
        StateSource(layer=1, rank=0, host="10.0.0.0", port=50),
        StateSource(layer=2, rank=2, host="10.0.0.2", port=52),
    )
    formed = [event for event in job.logged if isinstance(event, events.Formed)]
    assert [(each.generation.number, each.generation.members, each.step) for each in formed] == [
        (3, (0, 1, 2), 0),
        (4, (0, 2), 1),
    ]
    regrouped = next(effect.event for effect in job.without_logs if isinstance(effect, LogRegroup))
    assert (regrouped.cause, regrouped.lost, regrouped.joined) == ("loss", (1,), ())
    assert (regrouped.step, regrouped.rerun, regrouped.steps_lost) == (1, 1, 0)
    assert regrouped.reason == "rank 1: its process died; 2 ranks go on where there were 3"


def test_who_holds_the_vector_takes_the_others_along() -> None:
    job = train(Job(THREE)).take(DEAD)
    sha256 = vector_sha256((b"0", b"1", b"2"))
    job.take(Positioned(position(0, 1, (0, 1), vector_sha256=sha256), 1))
    job.take(Positioned(position(2, 0, (1, 2), undecided=1), 1))
    handover = Handover(holder=0, vector_sha256=sha256, lacking=frozenset({2}))
    assert job.without_logs[-1] == FinishCommit(
        frozenset({0, 2}), CommitOutcome(step=1, reported=0), 1, handover
    )
    recovered(job, plan_of(2, version=2), (0, 2))
    regrouped = next(effect.event for effect in job.without_logs if isinstance(effect, LogRegroup))
    assert (regrouped.step, regrouped.rerun, regrouped.steps_lost) == (1, 0, 0)


def test_a_rank_lost_with_its_standby_costs_the_steps_since_the_checkpoint() -> None:
    job = train(Job(THREE))
    report = checkpoint_report(2)
    job.take(
        Reported(step_report(1)), Reported(step_report(2)), Reported(report), Reported(step_report(3)), DEAD
    )
    job.take(Positioned(position(0, 3, (0,)), 1), Positioned(position(2, 3, (2,)), 1))
    recovered(job, plan_of(2, version=2), (0, 2))
    assert job.has.progress.step == 2
    formed = [event for event in job.logged if isinstance(event, events.Formed)][-1]
    assert (formed.start, formed.step) == (CheckpointRef(path="/out/2", step=2), 2)
    regrouped = next(effect.event for effect in job.without_logs if isinstance(effect, LogRegroup))
    assert regrouped.steps_lost == 1
    assert (
        "no remaining rank holds layer 1: back to the checkpoint of step 2, which costs 1" in regrouped.reason
    )


def test_a_return_to_a_snapshot_voids_the_steps_after_it() -> None:
    """Later reports of them no longer count, the log says how many, and a newcomer trusts no snapshot of its own."""
    job = train(Job(replace(THREE, elastic=ElasticConfig(spares=1, grow=False)))).take(Room(5), ready(3))
    job.take(*(Reported(step_report(step, generation=3)) for step in range(1, 5)), DEAD)
    own = SnapshotHeld(step=2, pieces=(Piece(0), Piece(1)))
    kept = SnapshotHeld(step=2, pieces=(Piece(2),))
    job.take(Positioned(position(0, 4, (0,), snapshots=(own,)), 1))
    job.take(Positioned(position(2, 4, (2,), snapshots=(kept,)), 1), Positioned(position(3, 0, ()), 1))
    recovered(job, plan_of(3, version=2), (0, 3, 2))
    follow = [effect for effect in job.without_logs if isinstance(effect, Follow)][-1]
    assert {rank: (each.step, each.start, each.fresh) for rank, each in follow.assignments.items()} == {
        0: (2, None, False),
        2: (2, None, False),
        3: (2, None, True),
    }
    assert [source.layer for source in follow.assignments[3].sources] == [1]
    assert (job.has.progress.step, job.has.progress.since) == (2, 4)
    formed = [event for event in job.logged if isinstance(event, events.Formed)][-1]
    assert (formed.start, formed.step, formed.snapshot) == (None, 2, True)
    regrouped = next(effect.event for effect in job.without_logs if isinstance(effect, LogRegroup))
    assert (regrouped.step, regrouped.steps_lost) == (2, 2)


@pytest.mark.parametrize("told", [True, False])
def test_a_step_that_is_gone_is_not_told_of_between_the_forming_and_the_first_step(told: bool) -> None:
    job = train(Job(THREE))
    saved = checkpoint_report(2)
    job.take(Reported(step_report(1)), Reported(step_report(2)), Reported(saved), DEAD)
    job.take(Positioned(position(0, 3, (0,)), 1), Positioned(position(2, 3, (2,)), 1))
    if told:
        job.take(Reported(step_report(3)))
    job.take(CommitFinished(0, 1), CommitFinished(2, 1))
    job.take(PlanReady(plan_of(2, version=2), build("1f1b", 2, 2, 1), 1))
    job.take(RankLoaded(0, None, 1), RankLoaded(2, None, 1), StoreUp("h", 8, 1), Joined(0, 1))
    assert isinstance(job.state, Joining)
    before = list(job.logged)
    job.take(Reported(step_report(4 if told else 3)))
    assert job.logged == before
    job.take(Joined(2, 1))
    regrouped = next(effect.event for effect in job.without_logs if isinstance(effect, LogRegroup))
    assert (regrouped.step, regrouped.steps_lost, job.has.progress.step) == (2, 1, 2)


def test_a_damaged_checkpoint_is_told_of_in_the_reason_with_what_it_costs() -> None:
    job = train(Job(THREE))
    for step in (1, 2, 3, 4, 5):
        job.take(Reported(step_report(step)))
        if step in (2, 4):
            job.take(Reported(checkpoint_report(step)))
    job.take(DEAD, Positioned(position(0, 5, (0,)), 1), Positioned(position(2, 5, (2,)), 1))
    job.take(
        CommitFinished(0, 1),
        CommitFinished(2, 1),
        PlanReady(plan_of(2, version=2), build("1f1b", 2, 2, 1), 1),
    )
    damage = DamagedCheckpoint(path="/out/4", file="0.safetensors", problem="is cut short")
    job.take(RankLoaded(0, damage, 1), RankLoaded(2, None, 1))
    recovered(job, plan_of(2, version=2), (0, 2))
    regrouped = next(effect.event for effect in job.without_logs if isinstance(effect, LogRegroup))
    assert (regrouped.step, regrouped.steps_lost) == (2, 3)
    assert regrouped.reason.endswith(
        "0.safetensors in /out/4 is cut short: back to the checkpoint of step 2, which costs 3 committed steps"
    )


def test_damaged_moments_are_replaced_by_older_ones_and_then_by_fresh_ones() -> None:
    job = train(Job(order_of(3, elastic=ElasticConfig(salvage="weights"))))
    for step in (1, 2, 3, 4, 5):
        job.take(Reported(step_report(step)))
        if step in (2, 4):
            job.take(Reported(checkpoint_report(step)))
    job.take(DEAD, Positioned(position(0, 5, (0,), weights=(1,)), 1), Positioned(position(2, 5, (2,)), 1))
    job.take(
        CommitFinished(0, 1),
        CommitFinished(2, 1),
        PlanReady(plan_of(2, version=2), build("1f1b", 2, 2, 1), 1),
    )
    for step, older in ((4, 2), (2, None)):
        follow = next(effect for effect in reversed(job.without_logs) if isinstance(effect, Follow))
        assert {a.moments.step for a in follow.assignments.values() if a.moments} == {step}
        damage = DamagedCheckpoint(path=f"/out/{step}", file="1.safetensors", problem="is cut short")
        job.take(RankLoaded(0, damage, 1), RankLoaded(2, None, 1))
        follow = next(effect for effect in reversed(job.without_logs) if isinstance(effect, Follow))
        assert {a.moments and a.moments.step for a in follow.assignments.values()} == {older}
        assert {(a.step, a.start) for a in follow.assignments.values()} == {(5, None)}
        assert {a.salvaged for a in follow.assignments.values()} == {frozenset({Piece(1)})}
    recovered(job, plan_of(2, version=2), (0, 2))
    regrouped = next(effect.event for effect in job.without_logs if isinstance(effect, LogRegroup))
    assert (regrouped.step, regrouped.steps_lost) == (5, 0)
    assert regrouped.reason.endswith("1.safetensors in /out/2 is cut short: fresh moments in their place")


def test_with_no_checkpoint_it_starts_over_and_says_so() -> None:
    job = train(Job(THREE)).take(Reported(step_report(1)), DEAD)
    job.take(Positioned(position(0, 1, (0,)), 1), Positioned(position(2, 1, (2,)), 1))
    recovered(job, plan_of(2, version=2), (0, 2))
    regrouped = next(effect.event for effect in job.without_logs if isinstance(effect, LogRegroup))
    assert (regrouped.step, regrouped.steps_lost) == (0, 1)


@pytest.mark.parametrize("length", range(7))
def test_a_second_loss_at_any_point_is_assessed_again(length: int) -> None:
    job = train(Job(THREE)).take(DEAD)
    shrunk = PlanReady(plan_of(2, version=2), build("1f1b", 2, 2, 1), 1)
    way: tuple[Stimulus, ...] = (
        Positioned(position(0, 0, (0, 1)), 1),
        Positioned(position(2, 0, (1, 2)), 1),
        CommitFinished(0, 1),
        CommitFinished(2, 1),
        shrunk,
        RankLoaded(0, None, 1),
        RankLoaded(2, None, 1),
        StoreUp("h", 8, 1),
    )
    states = (
        Assessing,
        Assessing,
        FinishingCommit,
        FinishingCommit,
        Planning,
        Loading,
        Loading,
        Hosting,
        Joining,
    )
    job.take(*way[:length])
    assert type(job.state) is states[length]
    job.take(RankLost(2, "its process died too", dead=True))
    if isinstance(job.state, Assessing) and job.state.waiting:
        job.take(Positioned(position(0, 0, (0, 1, 2)), job.has.progress.round))
    recovered(job, plan_of(1, version=9), (0,))
    assert isinstance(job.state, Training)
    assert job.has.membership.members == (0,)
    numbers = [event.generation.number for event in job.logged if isinstance(event, events.Formed)]
    assert numbers == list(range(3, 3 + len(numbers)))


def test_answers_to_an_attempt_that_was_given_up_change_nothing() -> None:
    job = train(Job(THREE)).take(CUT_OFF)
    before = job.state
    job.take(
        TrainingEnded(outcome(0)), Departed(Parted(rank=2, step=3)), Joined(1), RankLoaded(0, DAMAGE), PLANNED
    )
    assert job.state == before


def test_a_step_that_fails_is_tried_again_and_then_given_up() -> None:
    order = order_of(2, elastic=ElasticConfig(attempts=2))
    job = train(Job(order)).take(RankLost(1, "ValueError: no", details="where"))
    job.take(Positioned(position(0, 0, (0,)), 1), Positioned(position(1, 0, (1, 2)), 1))
    job.take(CommitFinished(0, 1), CommitFinished(1, 1))
    assert isinstance(job.state, Loading)  # the same plan
    recovered(job, PLAN, (0, 1))
    regrouped = next(effect.event for effect in job.without_logs if isinstance(effect, LogRegroup))
    assert (regrouped.cause, regrouped.lost) == ("retry", ())
    formed = [event for event in job.logged if isinstance(event, events.Formed)][-1]
    assert (formed.failures, formed.failed_at) == (1, 0)
    job.take(RankLost(0, "reset", cut_off=True, round=1), RankLost(1, "ValueError: no", round=1))
    job.take(Positioned(position(0, 0, (0,)), 2), Positioned(position(1, 0, (1, 2)), 2))
    assert isinstance(job.state, Closing)
    assert isinstance(job.state.end, JobFailed)
    assert job.state.end.reason.startswith(
        "rank 1: ValueError: no; 2 failures with no step committed beyond step 0"
    )


def test_a_rank_that_crashes_at_each_start_ends_the_job_though_the_job_waits_in_between() -> None:
    order = order_of(1, elastic=ElasticConfig(attempts=3))
    job = train(Job(order))
    for rank in range(3):
        assert isinstance(job.state, Training)
        job.take(Reported(step_report(1, generation=job.has.progress.generation)))
        job.take(RankLost(rank, "its process died", dead=True, round=job.has.progress.round))
        if rank < 2:
            assert isinstance(job.state, Waiting)
            job.take(Room(1), ready(rank + 1))
            job.take(Positioned(position(rank + 1, 0, ()), job.has.progress.round))
            recovered(job, plan_of(1), (rank + 1,))
    assert job.state == Closing(
        JobFailed(
            "rank 2: its process died; 3 failures with no step committed beyond step 1 (elastic.attempts = 3)",
            user_error=False,
        )
    )


def test_a_users_error_ends_the_job_whoever_is_heard_first() -> None:
    job = train(Job(THREE)).take(CUT_OFF, RankLost(1, "no such file", user_error=True))
    assert job.state == Closing(JobFailed("rank 1: no such file", user_error=True))


def test_without_redundancy_a_loss_ends_the_job_by_name() -> None:
    job = train(Job(replace(THREE, elastic=ElasticConfig(redundancy="none")))).take(CUT_OFF, DEAD)
    job.take(Positioned(position(0, 0, (0,)), 1), Positioned(position(2, 0, (2,)), 1))
    assert isinstance(job.state, Closing)
    assert isinstance(job.state.end, JobFailed)
    assert job.state.end.reason.startswith('rank 1: its process died; elastic.redundancy = "none"')


def test_a_stop_that_a_loss_overtook_is_asked_again() -> None:
    job = train(Job(THREE)).take(SaveOrStop(Request.STOP), DEAD)
    job.take(Positioned(position(0, 1, (0, 1)), 1), Positioned(position(2, 1, (2,)), 1))
    recovered(job, plan_of(2, version=2), (0, 2))
    assert isinstance(job.state, Stopping)
    assert job.without_logs[-1] == Ask(Request.STOP, 0)


@pytest.mark.parametrize("saved", [0, 1, 2])
def test_a_checkpoint_request_outlives_the_rank_that_had_it(saved: int) -> None:
    """It is requested again until a checkpoint later than the request is written or fails."""
    job = train(Job(THREE)).take(Reported(step_report(1)), SaveOrStop(Request.CHECKPOINT))
    assert job.without_logs[-1] == Ask(Request.CHECKPOINT, 0)
    if saved:
        job.take(Reported(checkpoint_report(saved)))
    dead = RankLost(0, "its process died", dead=True)
    job.take(dead, Positioned(position(1, 2, (0, 1)), 1), Positioned(position(2, 2, (2,)), 1))
    recovered(job, plan_of(2, version=2), (1, 2))
    assert isinstance(job.state, Training)
    again = [effect for effect in job.without_logs if isinstance(effect, Ask)][1:]
    assert again == ([] if saved == 2 else [Ask(Request.CHECKPOINT, 1)])


def test_words_that_are_lost_hold_nobody_up_for_longer_than_a_generation() -> None:
    job = train(Job(THREE)).take(Reported(step_report(1)), DEAD)
    # Only the lost rank knew of steps 2 and 3.
    job.take(Reported(step_report(4)), Reported(step_report(5)))
    job.take(Positioned(position(0, 5, (0, 1)), 1), Positioned(position(2, 5, (1, 2)), 1))
    recovered(job, plan_of(2, version=2), (0, 2))
    assert job.has.progress.step == 1
    number = job.has.progress.generation
    job.take(*(Reported(replace(step_report(step), generation=number)) for step in (6, 7)))
    assert [event.step for event in job.logged if isinstance(event, StepReport)] == [1, 4, 5, 6, 7]
    assert (job.has.progress.step, job.has.progress.early) == (7, ())


def test_what_several_ranks_tell_is_logged_once() -> None:
    job = train(Job(THREE)).take(Reported(step_report(1)), CUT_OFF, Reported(step_report(1)))
    assert job.logged.count(step_report(1)) == 1
