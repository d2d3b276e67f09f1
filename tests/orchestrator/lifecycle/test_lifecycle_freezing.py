"""Freeze plans over the life of a job: logged, sent to ranks that train, followed again after a resume."""

from __future__ import annotations

from dataclasses import replace

from lifecycle_jobs import RESUMED, SOLUTION, TO_TRAINING, Job, outcome

from orchestrator.events import types as events
from orchestrator.history.freeze_history import FreezeHistory
from orchestrator.lifecycle.effects import AppendToLog, Follow, Propose
from orchestrator.lifecycle.states import JobFinished, Training
from orchestrator.lifecycle.stimuli import (
    FreezeAsked,
    Noted,
    Released,
    Reported,
    SaveOrStop,
    Solved,
    TrainingEnded,
)
from planner.freezing import FreezeOverrides
from workers.protocol.orders import Request
from workers.protocol.reports import FreezeStarted


def test_a_freeze_plan_is_logged_before_it_is_sent() -> None:
    job = Job().take(*TO_TRAINING, Solved(SOLUTION))
    assert job.effects[-2:] == [AppendToLog(SOLUTION), Propose(SOLUTION.plan, (0, 1))]
    assert isinstance(job.state, Training)


def test_decisions_of_earlier_runs_are_followed_and_those_to_come_are_logged_again() -> None:
    begun, coming = (
        replace(SOLUTION.plan, version=version, start=start) for version, start in ((1, 9), (2, 10))
    )
    order = replace(RESUMED, freezing=FreezeHistory(plans=(begun, coming)))
    job = Job(order).take(*TO_TRAINING)
    follow = next(effect for effect in job.effects if isinstance(effect, Follow))
    assert all(each.freeze == (begun, coming) for each in follow.assignments.values())
    formed = next(index for index, event in enumerate(job.logged) if isinstance(event, events.Formed))
    assert job.logged[formed + 1 :] == [FreezeStarted(plan=coming)]


def test_ranks_that_end_are_sent_no_freeze_plan() -> None:
    job = Job().take(
        *TO_TRAINING,
        SaveOrStop(Request.STOP),
        Solved(SOLUTION),
        TrainingEnded(outcome(0)),
        TrainingEnded(outcome(1)),
    )
    job.take(Solved(SOLUTION), Released(), Solved(SOLUTION))
    job.take(Noted(events.Warned(text="the planner died")))
    assert isinstance(job.state, JobFinished)
    assert not any(isinstance(effect, Propose) for effect in job.without_logs)
    assert job.logged[-1] == events.Warned(text="the planner died")


CHANGE = events.FreezeChanged(
    from_step=5,
    method="none",
    r_max=0.8,
    by="a test",
    plan=replace(SOLUTION.plan, version=2, control=FreezeOverrides(method="none", r_max=0.8)),
)


def test_a_change_is_logged_before_it_is_sent_and_replaces_what_was_being_solved() -> None:
    job = Job().take(*TO_TRAINING, FreezeAsked(CHANGE))
    assert job.effects[-2:] == [AppendToLog(CHANGE), Propose(CHANGE.plan, (0, 1))]
    count = len(job.effects)
    assert job.take(Solved(SOLUTION)).effects[count:] == []
    assert job.has.intents.proposed == CHANGE.plan
    # The ranks had taken up the earlier one: the change is still to come.
    job.take(Reported(FreezeStarted(plan=replace(SOLUTION.plan, start=5))))
    assert job.has.intents.proposed == CHANGE.plan
    job.take(Reported(FreezeStarted(plan=replace(CHANGE.plan, start=6))))
    assert job.has.intents.proposed is None


def test_a_request_that_a_newer_one_has_overtaken_is_answered() -> None:
    newer = replace(CHANGE, id="b", plan=replace(CHANGE.plan, version=3))
    job = Job().take(*TO_TRAINING, FreezeAsked(newer), FreezeAsked(replace(CHANGE, id="a")))
    why = "another freeze request took its place"
    assert job.logged[-1] == events.Answered(id="a", done=False, step=0, text=why)
    assert job.has.intents.proposed == newer.plan
    job.take(SaveOrStop(Request.STOP), FreezeAsked(replace(newer, id="c")))
    answer = job.logged[-1]
    assert isinstance(answer, events.Answered)
    assert (answer.id, answer.done) == ("c", False)


def test_a_change_comes_with_its_solution() -> None:
    solution = replace(SOLUTION, plan=CHANGE.plan)
    job = Job().take(*TO_TRAINING, FreezeAsked(CHANGE, solution))
    assert job.effects[-3:] == [AppendToLog(CHANGE), AppendToLog(solution), Propose(CHANGE.plan, (0, 1))]


def test_a_change_that_no_rank_had_taken_up_is_sent_again_after_a_resume() -> None:
    order = replace(RESUMED, epoch=2, freezing=FreezeHistory(proposed=CHANGE.plan))
    job = Job(order).take(*TO_TRAINING)
    assert Propose(CHANGE.plan, (0, 1)) in job.effects
