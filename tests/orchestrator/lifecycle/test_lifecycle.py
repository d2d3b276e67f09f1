"""How a job begins and ends, driven by hand without cluster or clock; meaningless stimuli are errors."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from lifecycle_jobs import (
    DAMAGE,
    NEW,
    OLD,
    ORDER,
    PLAN,
    RESUMED,
    SOLUTION,
    TO_PREPARED,
    TO_TRAINING,
    Job,
    checkpoint_report,
    outcome,
    ready,
    step_report,
)

from orchestrator.events import types as events
from orchestrator.lifecycle.effects import (
    AppendToLog,
    Ask,
    Follow,
    HostStore,
    Join,
    MakePlan,
    Prepare,
    Release,
    Reserve,
    Train,
)
from orchestrator.lifecycle.machine import InvalidTransition, handle
from orchestrator.lifecycle.states import Closing, JobFailed, JobFinished, Stopping, Training
from orchestrator.lifecycle.stimuli import (
    Aborted,
    CommitFinished,
    Joined,
    Placed,
    RankLoaded,
    RankLost,
    Released,
    Reported,
    SaveOrStop,
    Solved,
    Start,
    Stimulus,
    StoreUp,
    TrainingEnded,
    Unplaceable,
)
from planner.rank_program import rank_programs
from workers.protocol.errors import DamagedCheckpoint
from workers.protocol.orders import Request
from workers.protocol.reports import StepReport
from workers.reproducibility.digest import state_digest


def test_a_whole_life() -> None:
    job = Job().take(*TO_TRAINING)
    assert isinstance(job.state, Training)
    job.take(Reported(step_report(1)), Reported(step_report(2)))
    assert job.state.job.membership.members == (0, 1)
    assert job.has.progress.step == 2
    job.take(TrainingEnded(outcome(1)), TrainingEnded(outcome(0)))
    assert isinstance(job.state, Closing)
    job.take(Released())
    assert job.state == JobFinished(9, stopped=False, state_sha256=state_digest(["a", "b", "c"]))
    kinds = [type(effect) for effect in job.without_logs]
    assert kinds == [Reserve, Prepare, MakePlan, Follow, HostStore, Join, Train, Release]
    assert job.logged[0] == events.Placing(ranks=(0, 1))
    assert [type(event) for event in job.logged] == [
        events.Placing,
        events.RankStarted,
        events.RankStarted,
        events.Issued,
        events.Formed,
        StepReport,
        StepReport,
        events.RankEnded,
        events.RankEnded,
        events.Finished,
    ]


def test_what_is_sent_is_logged_before() -> None:
    job = Job().take(*TO_TRAINING)
    generation = next(effect.generation for effect in job.effects if isinstance(effect, Join))
    assert (generation.number, generation.epoch) == (3, 1)
    assert generation.members == (0, 1)
    assert (generation.store_host, generation.store_port, generation.timeout_s) == ("h", 7, 30.0)
    formed = AppendToLog(events.Formed(generation=generation, start=None, step=0))
    assert job.effects.index(formed) < job.effects.index(Join(generation, 0))
    follow = next(effect for effect in job.effects if isinstance(effect, Follow))
    assert job.effects.index(AppendToLog(events.Issued(plan=PLAN))) < job.effects.index(follow)
    assert [each.place for each in follow.assignments.values()] == [0, 1]
    programs = rank_programs(ORDER.schedule)
    assert [(each.plan, each.program) for each in follow.assignments.values()] == [
        (PLAN, each) for each in programs
    ]


def test_a_stop_reaches_the_ranks_once_and_ends_the_job() -> None:
    job = Job().take(*TO_TRAINING, SaveOrStop(Request.CHECKPOINT))
    assert isinstance(job.state, Training)
    job.take(SaveOrStop(Request.STOP), SaveOrStop(Request.STOP), Reported(step_report(3)))
    assert isinstance(job.state, Stopping)
    assert job.state.waiting == {0, 1}
    job.take(
        TrainingEnded(outcome(0, stopped=True, step=3)),
        TrainingEnded(outcome(1, stopped=True, step=3)),
        Released(),
    )
    assert job.state == JobFinished(3, stopped=True, state_sha256=state_digest(["a", "b", "c"]))
    assert [effect for effect in job.without_logs if isinstance(effect, Ask)] == [
        Ask(Request.CHECKPOINT, 0),
        Ask(Request.STOP, 0),
    ]


@pytest.mark.parametrize("length", range(len(TO_TRAINING)))
def test_a_stop_before_training_needs_no_rank(length: int) -> None:
    job = Job(RESUMED).take(*TO_TRAINING[:length], SaveOrStop(Request.STOP), Released())
    assert job.state == JobFinished(8, stopped=True, state_sha256=None)
    assert job.without_logs[-1] == Release()


@pytest.mark.parametrize("length", range(len(TO_TRAINING) + 1))
def test_an_abort_releases_at_once(length: int) -> None:
    job = Job().take(*TO_TRAINING[:length], Aborted())
    assert isinstance(job.state, Closing)
    assert job.without_logs[-1] == Release()
    job.take(Released())
    assert isinstance(job.state, JobFailed)


def test_what_the_cluster_lacks_ends_the_job() -> None:
    job = Job().take(Start(), Unplaceable("4 GPU missing"), Released())
    assert job.state == JobFailed("4 GPU missing", user_error=True)


def test_a_damaged_checkpoint_is_told_and_the_one_before_is_used() -> None:
    job = Job(RESUMED).take(*TO_PREPARED, RankLoaded(1, DAMAGE), RankLoaded(0, None))
    assert events.Skipped(rank=1, damage=DAMAGE) in job.logged
    follows = [effect for effect in job.without_logs if isinstance(effect, Follow)]
    starts = [(each.start, each.step) for follow in follows for each in follow.assignments.values()]
    assert starts == [(NEW, 8), (NEW, 8), (OLD, 4), (OLD, 4)]
    job.take(RankLoaded(0, None), RankLoaded(1, None), StoreUp("h", 7), Joined(0), Joined(1))
    assert isinstance(job.state, Training)
    assert job.has.progress.step == 4
    assert any(isinstance(event, events.Formed) and event.start == OLD for event in job.logged)


def test_no_whole_checkpoint_is_the_users_to_mend() -> None:
    job = Job(RESUMED).take(*TO_PREPARED)
    for damage in (DAMAGE, DamagedCheckpoint(path="/out/4", file="manifest.json", problem="is cut short")):
        job.take(RankLoaded(0, None), RankLoaded(1, damage))
    job.take(Released())
    assert isinstance(job.state, JobFailed)
    assert job.state.user_error
    assert "manifest.json in /out/4: is cut short" in job.state.reason


@pytest.mark.parametrize("length", [2, 3, 4, 5, 6])
def test_a_failure_before_the_ranks_are_joined_ends_the_job_at_once(length: int) -> None:
    job = Job().take(*TO_TRAINING[:length], RankLost(1, "no such file", user_error=True))
    assert job.state == Closing(JobFailed("rank 1: no such file", user_error=True))


def test_an_unwritten_last_checkpoint_is_a_failure() -> None:
    job = Job().take(
        *TO_TRAINING, TrainingEnded(outcome(0)), TrainingEnded(outcome(1, checkpoint_error="disk full"))
    )
    assert isinstance(job.state, Closing)
    assert isinstance(job.state.end, JobFailed)
    assert "trained to step 9" in job.state.end.reason
    assert "disk full" in job.state.end.reason
    # `--resume` would report the same.
    assert "No earlier checkpoint exists" in job.state.end.reason


def test_an_unwritten_last_checkpoint_leaves_the_one_before_it() -> None:
    saved = Reported(checkpoint_report(5))
    job = Job().take(
        *TO_TRAINING,
        saved,
        TrainingEnded(outcome(0)),
        TrainingEnded(outcome(1, checkpoint_error="disk full")),
    )
    assert isinstance(job.state, Closing)
    assert isinstance(job.state.end, JobFailed)
    assert "--resume goes on from the checkpoint of step 5" in job.state.end.reason


def test_siblings_that_differ_are_a_failure() -> None:
    twin = outcome(1, layer_digests=((0, "other"),))
    job = Job().take(*TO_TRAINING, TrainingEnded(outcome(0)), TrainingEnded(twin))
    assert isinstance(job.state, Closing)
    assert isinstance(job.state.end, JobFailed)
    assert "layer 0" in job.state.end.reason


def test_late_reports_are_kept() -> None:
    report = checkpoint_report(9)
    job = Job().take(*TO_TRAINING, TrainingEnded(outcome(0)), TrainingEnded(outcome(1)))
    job.take(Reported(report), Released(), Reported(report))
    assert job.logged.count(report) == 2
    assert isinstance(job.state, JobFinished)


@pytest.mark.parametrize(
    ("before", "stimulus"),
    [
        ((), Placed()),
        (TO_TRAINING[:3], Solved(SOLUTION)),
        ((Start(),), Start()),
        ((Start(),), ready(0)),
        (TO_PREPARED[:3], Joined(0)),
        (TO_TRAINING, Placed()),
        (TO_TRAINING, CommitFinished(0)),
        (TO_TRAINING, Released()),
        (TO_PREPARED, TrainingEnded(outcome(0))),
    ],
)
def test_a_pair_that_means_nothing_raises_with_the_story(
    before: Iterable[Stimulus], stimulus: Stimulus
) -> None:
    job = Job().take(*before)
    with pytest.raises(InvalidTransition) as caught:
        handle(job.order, job.state, stimulus, tuple(before))
    assert caught.value.history == tuple(before)
    assert repr(stimulus) in str(caught.value)
    assert all(repr(past) in str(caught.value) for past in before)
