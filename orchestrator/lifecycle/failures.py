"""Rank failures by state: the attempt is abandoned, or nothing depends on the rank, or the job ends.

Once the survivors have reported their positions, `recovery.py` decides what follows, and `regroup.py` asks it.

A part of the lifecycle, and pure.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from orchestrator.lifecycle import ending, in_training, joins, regroup
from orchestrator.lifecycle.effects import Dismiss, Step
from orchestrator.lifecycle.ending import close, verdict
from orchestrator.lifecycle.states import (
    Assessed,
    Assessing,
    Closing,
    FinishingCommit,
    Hosting,
    Joining,
    Loading,
    Order,
    Own,
    Planning,
    Saving,
    Training,
    Trains,
    Waiting,
)
from orchestrator.lifecycle.stimuli import RankLost

Forms = TypeVar("Forms", bound=FinishingCommit | Planning | Loading | Hosting | Joining)


def lost_training(order: Order, state: Trains, stimulus: RankLost) -> Step[Trains | Assessed | Closing]:
    """A member's failure ends the generation; an exception from an earlier round is ignored."""
    if stimulus.rank not in state.job.membership.members:
        return lost_aside(order, state, stimulus)
    if stimulus.user_error:
        return _end_by(stimulus)
    if not stimulus.dead and stimulus.round != state.job.progress.round:
        return state, ()
    return regroup.assess(order, state.job, (stimulus,))


def lost_aside(order: Order, state: Own, stimulus: RankLost) -> Step[Own]:
    """A rank without a place failed, or did not start: nothing depends on it."""
    job = in_training.without(state.job, stimulus.rank)
    job, effects = in_training.consider(order, job) if isinstance(state, Training) else (job, ())
    job, drained = in_training.drained(job)
    lost = (ending.log_loss(stimulus), Dismiss(frozenset({stimulus.rank})))
    return replace(state, job=job), (*lost, *effects, *drained)


def lost_regrouping(order: Order, state: Forms, stimulus: RankLost) -> Step[Forms | Assessed | Closing]:
    """A failure during a regroup restarts the regroup, if anything depends on the rank."""
    if stimulus.rank in state.job.membership.starting:
        return lost_aside(order, state, stimulus)
    if stimulus.user_error:
        return _end_by(stimulus)
    recovery_plan = (
        state.draft.recovery_plan if isinstance(state, Loading | Hosting | Joining) else state.recovery_plan
    )
    involved = (
        recovery_plan.finishing
        | frozenset(recovery_plan.lineup)
        | {source.rank for source in recovery_plan.sources}
    )
    if stimulus.rank not in involved:
        return lost_aside(order, state, stimulus)
    if not stimulus.dead and stimulus.round != state.job.progress.round:
        return state, ()
    draft = state.draft if isinstance(state, Loading | Hosting | Joining) else None
    failed = None if draft is None else (draft.plan, draft.members)
    return regroup.assess(order, state.job, (stimulus,), failed)


def lost_waiting(order: Order, state: Waiting, stimulus: RankLost) -> Step[Waiting | Assessed]:
    """A rank that holds state failed while the job waits, or one that was starting: then the ranks that did
    start may be enough."""
    called = stimulus.rank in state.job.membership.starting
    if not stimulus.dead and not called:
        return state, ()
    state, effects = lost_aside(order, state, stimulus)
    if not called:
        return state, effects
    after, more = joins.go_on(order, state)
    return after, (*effects, *more)


def lost_saving(order: Order, state: Saving, stimulus: RankLost) -> Step[Saving]:
    """Dismiss a dead rank; the checkpoint's report tells whether the rank was needed."""
    return lost_aside(order, state, stimulus) if stimulus.dead else (state, ())


def _end_by(loss: RankLost) -> Step[Closing]:
    closing, effects = close(verdict(loss))
    return closing, (ending.log_loss(loss), *effects)


def lost_assessing(order: Order, state: Assessing, stimulus: RankLost) -> Step[Assessed | Closing]:
    """A rank that was asked for its position is dead, or reports why its training failed."""
    if stimulus.user_error and stimulus.rank not in state.job.membership.starting:
        return _end_by(stimulus)
    return regroup.assess_without(order, state, stimulus)
