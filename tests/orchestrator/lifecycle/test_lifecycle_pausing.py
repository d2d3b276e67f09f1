"""Pause and resume of a job."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lifecycle_jobs import (
    DEAD,
    ORDER,
    THREE,
    Job,
    checkpoint_report,
    plan_of,
    position,
    ready,
    recovered,
    step_report,
    train,
)

from orchestrator.events import types as events
from orchestrator.history.job_view import JobView, fold
from orchestrator.lifecycle.effects import (
    AppendToLog,
    Ask,
    Dismiss,
    LogRegroup,
    Reclaim,
    Recruit,
    Reserve,
    Train,
)
from orchestrator.lifecycle.machine import handle
from orchestrator.lifecycle.states import (
    Assessing,
    Closing,
    JobFinished,
    JobPaused,
    Pending,
    Reclaiming,
    Stopping,
    Training,
    Waiting,
)
from orchestrator.lifecycle.stimuli import (
    PauseAsked,
    Placed,
    Positioned,
    Reclaimed,
    Reported,
    ResumeAsked,
    Room,
    SaveOrStop,
    Start,
    TrainingEnded,
)
from orchestrator.lifecycle.takeover import taken_over
from planner.plan import Plan
from workers.config import ElasticConfig
from workers.protocol.orders import Generation, Request
from workers.protocol.reports import Outcome

PAUSED = events.Paused(reason="on request", step=4, requested=True)


def ended(rank: int, **changes: object) -> TrainingEnded:
    fields = {"rank": rank, "step": 4, "stopped": True, "layer_digests": (), **changes}
    return TrainingEnded(Outcome(**fields))  # pyright: ignore[reportArgumentType]


def at_step_3() -> Job:
    job = train(Job(THREE))
    return job.take(*(Reported(step_report(step, generation=3)) for step in range(1, 4)))


def paused() -> Job:
    job = at_step_3().take(PauseAsked())
    assert job.without_logs[-1] == Ask(Request.STOP, 0)
    job.take(Reported(step_report(4, generation=3)), Reported(checkpoint_report(4)))
    return job.take(*(ended(rank) for rank in range(3)))


def test_a_pause_gives_the_ranks_back_once_a_checkpoint_has_the_step() -> None:
    job = paused()
    assert isinstance(job.state, JobPaused)
    assert job.logged[-1] == PAUSED
    assert job.without_logs[-1] == Dismiss(frozenset({0, 1, 2}))
    assert (job.has.membership.alive, job.has.membership.members) == (frozenset(), ())
    # A paused job takes no offered room and does not change.
    count = len(job.effects)
    job.take(Room(8), PauseAsked())
    assert isinstance(job.state, JobPaused)
    assert len(job.effects) == count


def test_a_paused_job_resumes_on_other_ranks() -> None:
    job = paused().take(ResumeAsked())
    assert isinstance(job.state, Waiting)
    assert job.logged[-1] == events.Requested(request="resume")
    job.take(Room(8))
    assert job.without_logs[-1] == Recruit((3, 4, 5))
    job.take(*map(ready, (3, 4, 5)))
    number = job.has.progress.round
    job.take(*(Positioned(position(rank, 0, ()), number) for rank in (3, 4, 5)))
    recovered(job, plan_of(3, version=2), (3, 4, 5))
    assert isinstance(job.state, Training)
    train_again = next(effect for effect in reversed(job.without_logs) if isinstance(effect, Train))
    assert (train_again.ranks, train_again.step) == ((3, 4, 5), 4)
    regrouped = next(effect.event for effect in job.without_logs if isinstance(effect, LogRegroup))
    assert (regrouped.cause, regrouped.step, regrouped.rerun, regrouped.steps_lost) == ("resume", 4, 0, 0)
    assert regrouped.reason == "resumed from the checkpoint of step 4 on 3 ranks"
    # It may be paused again.
    job.take(PauseAsked())
    assert job.without_logs[-1] == Ask(Request.STOP, 3)


def test_a_rank_that_came_up_after_the_pause_is_given_back() -> None:
    order = replace(THREE, elastic=ElasticConfig(wait_s=60, spares=1))
    job = train(Job(order)).take(Room(1), PauseAsked())
    job.take(*(Reported(step_report(step, generation=3)) for step in range(1, 5)))
    job.take(Reported(checkpoint_report(4)), *(ended(rank) for rank in range(3)), ready(3))
    assert isinstance(job.state, JobPaused)
    assert job.without_logs[-1] == Dismiss(frozenset({3}))


def test_a_loss_before_the_pause_is_recovered_from_and_the_pause_is_asked_for_again() -> None:
    job = at_step_3().take(PauseAsked(), DEAD)
    assert isinstance(job.state, Assessing)
    number = job.has.progress.round
    job.take(*(Positioned(position(rank, 3, holds), number) for rank, holds in ((0, (0, 1)), (2, (2,)))))
    recovered(job, plan_of(2, version=2), (0, 2))
    assert job.without_logs[-1] == Ask(Request.STOP, 0)
    number = job.has.progress.round
    job.take(Reported(checkpoint_report(4)))
    job.take(*(replace(ended(rank), round=number) for rank in (0, 2)))
    assert isinstance(job.state, JobPaused)


def test_a_pause_whose_checkpoint_cannot_be_written_is_tried_again() -> None:
    job = at_step_3().take(PauseAsked())
    job.take(*(ended(rank, checkpoint_error="disk full") for rank in range(3)))
    assert isinstance(job.state, Assessing)
    failed = job.logged[-1]
    assert isinstance(failed, events.RankFailed)
    assert failed.error == "the checkpoint of step 4, for the pause, was not written: disk full"
    assert job.has.intents.halting


def test_a_job_that_waits_for_capacity_pauses_once_what_its_ranks_hold_is_written() -> None:
    order = replace(THREE, elastic=ElasticConfig(wait_s=60, min_ranks=3))
    job = train(Job(order))
    job.take(*(Reported(step_report(step, generation=3)) for step in range(1, 5)), DEAD)
    job.take(*(Positioned(position(rank, 4, holds), 1) for rank, holds in ((0, (0, 1)), (2, (1, 2)))))
    job.take(PauseAsked())
    assert isinstance(job.state, Waiting)
    job.take(Reported(checkpoint_report(4)))
    assert isinstance(job.state, JobPaused)
    assert job.without_logs[-1] == Dismiss(frozenset({0, 2}))


@pytest.mark.parametrize("asked", [Request.STOP, Request.CHECKPOINT])
def test_a_paused_job_can_be_stopped(asked: Request) -> None:
    job = paused().take(SaveOrStop(asked))
    if asked is Request.CHECKPOINT:
        assert isinstance(job.state, JobPaused)
        return
    assert isinstance(job.state, Closing)
    assert job.state.end == JobFinished(4, stopped=True, state_sha256=None)


def test_a_stop_wins_over_a_pause() -> None:
    job = at_step_3().take(PauseAsked(), SaveOrStop(Request.STOP))
    assert isinstance(job.state, Stopping)
    digests = {rank: ((rank, "a"),) for rank in range(3)}
    job.take(*(ended(rank, layer_digests=digests[rank]) for rank in range(3)))
    assert isinstance(job.state, Closing)


def test_the_last_step_ends_a_job_that_was_to_pause() -> None:
    job = at_step_3().take(PauseAsked())
    job.take(*(ended(rank, stopped=False, layer_digests=((rank, "a"),)) for rank in range(3)))
    assert isinstance(job.state, Closing)


def test_a_pause_that_comes_before_training_waits_for_it() -> None:
    job = Job(ORDER).take(Start(), PauseAsked())
    assert job.without_logs == [Reserve((0, 1))]
    job.take(Placed())
    assert job.has.intents.halting


def view(plan: Plan, *logged: events.Event) -> JobView:
    generation = Generation(number=3, epoch=1, members=(0, 1, 2), store_host="h", store_port=1, timeout_s=1.0)
    log = (
        events.Submitted(job="j", epoch=1, spec={}, resume=False),
        *(events.RankStarted(rank=rank, node=f"n{rank}", host="h", pid=rank) for rank in range(3)),
        events.Issued(plan=plan),
        events.Formed(generation=generation, start=None, step=0),
        *(step_report(step, generation=3) for step in range(1, 5)),
        checkpoint_report(4),
        *logged,
    )
    return fold(events.Record(time_s=float(index), event=event) for index, event in enumerate(log))


ASKED, RESUMED = events.Requested(request="pause"), events.Requested(request="resume")


def test_the_view_tells_a_pause_from_a_wait() -> None:
    assert (view(THREE.plan, ASKED).state, view(THREE.plan, ASKED).pausing) == ("training", True)
    done = view(THREE.plan, ASKED, PAUSED)
    assert (done.state, done.pausing, done.ranks.alive, done.ranks.next_rank) == ("paused", False, set(), 3)
    assert view(THREE.plan, ASKED, PAUSED, RESUMED).state == "waiting"
    assert view(THREE.plan, events.Paused(reason="2 ranks left", step=4)).state == "waiting"


def test_a_paused_job_stays_paused_when_its_controller_is_lost() -> None:
    order = taken_over(THREE, view(THREE.plan, ASKED, PAUSED))
    state, effects = handle(order, Pending(), Start())
    assert isinstance(state, JobPaused)
    assert (state.step, effects) == (4, ())
    state, _ = handle(order, state, ResumeAsked())
    _, effects = handle(order, state, Room(3))
    assert effects == (AppendToLog(events.Placing(ranks=(3, 4, 5))), Recruit((3, 4, 5)))


def test_a_resume_goes_on_when_the_controller_is_lost_meanwhile() -> None:
    up = events.RankStarted(rank=3, node="n3", host="h", pid=3)
    order = taken_over(THREE, view(THREE.plan, ASKED, PAUSED, RESUMED, up))
    state, _ = handle(order, Pending(), Start())
    assert isinstance(state, Waiting)
    assert state.job.membership.alive == frozenset()
    _, effects = handle(order, state, Room(3))
    assert effects == (AppendToLog(events.Placing(ranks=(4, 5, 6))), Recruit((4, 5, 6)))


def test_a_pause_is_asked_for_again_by_the_next_controller() -> None:
    order = taken_over(THREE, view(THREE.plan, ASKED))
    job = Job(order).take(Start())
    assert isinstance(job.state, Reclaiming)
    (reclaim,) = (effect for effect in job.without_logs if isinstance(effect, Reclaim))
    job.take(*(Reclaimed(rank, f"n{rank}", "h", reclaim.round) for rank in range(3)))
    assert job.without_logs[-1] == Ask(Request.STOP, 0)
