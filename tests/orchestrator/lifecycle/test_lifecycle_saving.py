"""When a job has to wait or to end, what its ranks hold is written before they may be lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lifecycle_jobs import (
    DEAD,
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
from orchestrator.lifecycle.effects import Assess, Dismiss, LogRegroup, Recruit, Save, Wait
from orchestrator.lifecycle.recovery import Rescue
from orchestrator.lifecycle.states import Assessing, Closing, JobFailed, JobFinished, Saving, State, Waiting
from orchestrator.lifecycle.stimuli import (
    CommitFinished,
    Positioned,
    RankLost,
    Reported,
    Room,
    SaveOrStop,
    Unplannable,
    WaitOver,
)
from workers.config import ElasticConfig
from workers.protocol.orders import CommitOutcome, Request
from workers.protocol.reports import CheckpointReport

STRICT = replace(THREE, elastic=ElasticConfig(min_ranks=3, wait_s=60))
RESCUE = Rescue(
    step=4,
    finishing=frozenset({0, 2}),
    commit_outcome=CommitOutcome(step=4, reported=4),
    layers={0: (0,), 2: (1, 2)},
)
WRITTEN = checkpoint_report(4)
FAILED = CheckpointReport(step=4, path="/out/4", bytes=0, seconds=0.1, error="No space left on device")


def paused(order: object = STRICT) -> Job:
    """A job that lost rank 1 in step 5, where the others hold all layers of step 4."""
    job = train(Job(order))  # pyright: ignore[reportArgumentType]
    job.take(*(Reported(step_report(step, generation=3)) for step in range(1, 5)), DEAD)
    return job.take(
        *(Positioned(position(rank, 4, holds, began=5), 1) for rank, holds in ((0, (0, 1)), (2, (1, 2))))
    )


def end_of(state: State) -> JobFinished | JobFailed:
    assert isinstance(state, Closing)
    return state.end


def test_a_job_that_waits_writes_what_no_checkpoint_has() -> None:
    job = paused()
    assert job.without_logs[-2:] == [Save(RESCUE, THREE.plan, job.has.progress.generation + 1), Wait(60, 1)]
    job.take(Reported(WRITTEN))
    assert job.logged[-1] == WRITTEN
    assert job.has.progress.checkpoints[0].step == 4
    # All ranks that held step 4 are gone. Still no committed step is lost; the one in flight is run again.
    job.take(*(RankLost(rank, "gone", dead=True) for rank in (0, 2)), Room(3), *map(ready, (3, 4, 5)))
    job.take(*(Positioned(position(rank, 0, ()), 2) for rank in (3, 4, 5)))
    recovered(job, plan_of(3, version=2), (3, 4, 5))
    regrouped = next(effect.event for effect in job.without_logs if isinstance(effect, LogRegroup))
    assert (regrouped.step, regrouped.steps_lost, regrouped.rerun) == (4, 0, 1)


def test_a_checkpoint_that_has_it_already_is_enough() -> None:
    job = train(Job(STRICT)).take(*(Reported(step_report(step, generation=3)) for step in range(1, 5)))
    job.take(Reported(WRITTEN), DEAD)
    job.take(*(Positioned(position(rank, 4, holds), 1) for rank, holds in ((0, (0, 1)), (2, (1, 2)))))
    assert isinstance(job.state, Waiting)
    assert not any(isinstance(effect, Save) for effect in job.without_logs)
    job.take(SaveOrStop(Request.STOP))
    assert end_of(job.state) == JobFinished(4, stopped=True, state_sha256=None)


def test_a_stop_waits_for_what_is_being_written() -> None:
    job = paused().take(SaveOrStop(Request.STOP))
    assert isinstance(job.state, Saving)
    job.take(Room(4), WaitOver(1), SaveOrStop(Request.STOP))
    assert isinstance(job.state, Saving)
    job.take(Reported(WRITTEN))
    assert end_of(job.state) == JobFinished(4, stopped=True, state_sha256=None)


def test_a_stop_says_what_could_not_be_written() -> None:
    job = paused().take(Reported(FAILED), SaveOrStop(Request.STOP))
    end = end_of(job.state)
    assert isinstance(end, JobFailed)
    assert end.reason == (
        "stopped while the job waited for capacity; 4 committed steps could not be written: there is no checkpoint:"
        " start the job again with another job.output"
    )


def test_the_end_of_patience_waits_for_what_is_being_written() -> None:
    job = paused().take(WaitOver(1))
    assert isinstance(job.state, Saving)
    job.take(Reported(WRITTEN))
    end = end_of(job.state)
    assert isinstance(end, JobFailed)
    assert end.reason == (
        "rank 1: its process died: 2 ranks left, and elastic.min_ranks = 3; no capacity came within 60 s"
        " (elastic.wait_s). The checkpoint of step 4 stays: --resume goes on from it"
    )


def test_a_job_without_a_checkpoint_is_not_told_to_resume() -> None:
    job = train(Job(STRICT)).take(DEAD)
    job.take(*(Positioned(position(rank, 0, holds), 1) for rank, holds in ((0, (0, 1)), (2, (1, 2)))))
    end = end_of(job.take(WaitOver(1)).state)
    assert isinstance(end, JobFailed)
    assert end.reason == (
        "rank 1: its process died: 2 ranks left, and elastic.min_ranks = 3; no capacity came within 60 s"
        " (elastic.wait_s). No step was committed, and there is no checkpoint: start the job again with the same spec"
    )


def test_whoever_gives_up_writes_before() -> None:
    job = paused(replace(THREE, elastic=ElasticConfig(min_ranks=3, wait_s=0)))
    assert isinstance(job.state, Saving)
    assert job.without_logs[-1] == Save(RESCUE, THREE.plan, job.has.progress.generation + 1)
    job.take(RankLost(0, "gone", dead=True), Reported(FAILED))
    end = end_of(job.state)
    assert isinstance(end, JobFailed)
    assert "elastic.wait_s = 0 waits for no others; 4 committed steps could not be written" in end.reason


def test_ranks_for_which_there_is_no_plan_write_what_they_hold() -> None:
    job = paused(THREE).take(
        CommitFinished(0, 1), CommitFinished(2, 1), Unplannable("no plan for 2 ranks: memory", 1)
    )
    assert isinstance(job.state, Waiting)
    assert job.without_logs[-2] == Save(RESCUE, THREE.plan, job.has.progress.generation + 1)


def test_weights_without_moments_are_not_written_as_if_they_were_layers() -> None:
    job = train(Job(replace(THREE, elastic=ElasticConfig(wait_s=60, salvage="weights"))))
    job.take(*(Reported(step_report(step, generation=3)) for step in range(1, 5)), DEAD)
    job.take(Positioned(position(0, 4, (0,), weights=(1,)), 1), Positioned(position(2, 4, (2,)), 1))
    job.take(CommitFinished(0, 1), CommitFinished(2, 1), Unplannable("no plan for 2 ranks: memory", 1))
    assert isinstance(job.state, Waiting)
    assert not any(isinstance(effect, Save) for effect in job.without_logs)


@pytest.mark.parametrize("dead", [True, False])
def test_a_rank_that_never_comes_up_holds_no_pause_up(dead: bool) -> None:
    """Two ranks were recruited and one comes up, which is enough."""
    order = replace(THREE, elastic=ElasticConfig(min_ranks=3, wait_s=60, spares=1))
    job = paused(order).take(Room(4))
    assert job.without_logs[-1] == Recruit((3, 4))
    job.take(ready(3))
    assert isinstance(job.state, Waiting)
    job.take(RankLost(4, "did not start within 60 s", dead=dead))
    assert Dismiss(frozenset({4})) in job.without_logs
    assert isinstance(job.state, Assessing)
    assert job.without_logs[-1] == Assess(frozenset({0, 2, 3}), 2, job.has.progress.generation)


@pytest.mark.parametrize("dead", [True, False])
def test_one_that_never_comes_up_is_called_again(dead: bool) -> None:
    job = paused().take(Room(4), RankLost(3, "could not be added", dead=dead), Room(4))
    assert isinstance(job.state, Waiting)
    assert job.without_logs[-1] == Recruit((4,))


def test_the_error_of_a_newcomer_ends_no_job_that_recovers() -> None:
    """It may not see the folder, for example, but nothing depends on it."""
    job = train(Job(THREE)).take(Reported(step_report(1, generation=3)))
    job.take(RankLost(1, "its process died", dead=True))
    job.state = replace(
        job.state, job=replace(job.has, membership=replace(job.has.membership, starting=frozenset({3})))
    )  # pyright: ignore
    blind = RankLost(3, "node n does not see the job's folder", user_error=True)
    job.take(blind)
    assert isinstance(job.state, Assessing)
    assert job.logged[-1] == events.RankFailed(rank=3, error=blind.error, details="")
    assert job.has.membership.starting == frozenset()
    assert job.without_logs[-1] == Dismiss(frozenset({3}))
