"""Pause and resume on request: a paused job keeps its controller, its log and a checkpoint, and has no ranks.

A part of the lifecycle, and pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.events import types as events
from orchestrator.lifecycle import in_training, moves, regroup
from orchestrator.lifecycle.effects import AppendToLog, Dismiss, Step
from orchestrator.lifecycle.ending import close
from orchestrator.lifecycle.states import (
    Assessed,
    Closing,
    JobData,
    JobFinished,
    JobPaused,
    Order,
    Own,
    Training,
    Waiting,
)
from orchestrator.lifecycle.stimuli import PauseAsked, RankLost, Ready, ResumeAsked, SaveOrStop
from workers.protocol.orders import Request
from workers.protocol.reports import Outcome

REQUESTED = AppendToLog(events.Requested(request="pause"))


def ask(order: Order, state: Training, stimulus: PauseAsked) -> Step[Training]:
    """The ranks end as for a stop: after the step in flight, with a checkpoint of it."""
    job, effects = in_training.ask_pause(replace(state.job, intents=replace(state.job.intents, halting=True)))
    return replace(state, job=job), (REQUESTED, *effects)


def ask_between(order: Order, state: Own, stimulus: PauseAsked) -> Step[Own]:
    """No generation trains: the next one gets the request."""
    return replace(state, job=replace(state.job, intents=replace(state.job.intents, halting=True))), (
        REQUESTED,
    )


def ask_waiting(order: Order, state: Waiting, stimulus: PauseAsked) -> Step[Waiting | JobPaused]:
    """A job that waits for capacity pauses once a checkpoint holds all that its ranks hold."""
    after, effects = written(
        replace(state, job=replace(state.job, intents=replace(state.job.intents, halting=True)))
    )
    return after, (REQUESTED, *effects)


def written(state: Waiting) -> Step[Waiting | JobPaused]:
    """Pause a waiting job if that was requested and its checkpoint is complete."""
    job = state.job
    if not job.intents.halting or state.saving is not None or _newest(job) < state.step:
        return state, ()
    return _halt(job, state.step)


def ended(order: Order, job: JobData, outcomes: Sequence[Outcome]) -> Step[JobPaused | Assessed]:
    """All ranks have ended after the same step. If its checkpoint was not written, regroup and try again."""
    step = outcomes[0].step
    if _newest(job) >= step:
        return _halt(job, step)
    failed = next((outcome for outcome in outcomes if outcome.checkpoint_error), outcomes[0])
    error = f"the checkpoint of step {step}, for the pause, was not written: {failed.checkpoint_error}"
    return regroup.assess(order, job, (RankLost(failed.rank, error),))


def _halt(job: JobData, step: int) -> Step[JobPaused]:
    """Release all ranks; `newcomer` releases those that are still starting."""
    ranks = job.membership.alive
    job, void = moves.voided(job, "the job pauses")
    nobody = frozenset[int]()
    job = replace(
        job,
        membership=replace(
            job.membership, members=(), alive=nobody, going=nobody, tried=nobody, nodes={}, hosts={}
        ),
        progress=replace(
            job.progress,
            early=(),
            prepared=None,
            paused=False,
            interrupted=False,
            round=job.progress.round + 1,
        ),
        intents=replace(job.intents, save_after=None, asked=None, pausing=False, halting=False),
    )
    job, drained = in_training.drained(job)
    paused = AppendToLog(
        events.Paused(
            reason="on request",
            step=step,
            requested=True,
            failures=job.progress.failures,
            failed_at=job.progress.failed_at,
        )
    )
    return JobPaused(job, step), (*void, paused, *drained, Dismiss(ranks))


def newcomer(order: Order, state: JobPaused, stimulus: Ready) -> Step[JobPaused]:
    """Release a rank that was started before the pause and is up only now."""
    job, drained = in_training.drained(in_training.without(state.job, stimulus.rank))
    return replace(state, job=job), (*drained, Dismiss(frozenset({stimulus.rank})))


def resume(order: Order, state: JobPaused, stimulus: ResumeAsked) -> Step[Waiting]:
    """Place ranks as soon as there is room, without a time limit."""
    return go_on(state.job, state.step), (AppendToLog(events.Requested(request="resume")),)


def go_on(job: JobData, step: int) -> Waiting:
    """Return the state of a job that waits for room to resume."""
    return Waiting(
        replace(
            job,
            progress=replace(
                job.progress, paused=True, pauses=job.progress.pauses + 1, out_of_patience=False
            ),
        ),
        "resumed",
        step,
    )


def stop(order: Order, state: JobPaused, stimulus: SaveOrStop) -> Step[JobPaused | Closing]:
    """Stop a paused job. A request for a checkpoint is only logged: the job has one."""
    log = AppendToLog(events.Requested(request=stimulus.request.value))
    if stimulus.request is not Request.STOP:
        return state, (log,)
    closing, effects = close(JobFinished(state.step, stopped=True, state_sha256=None))
    return closing, (log, *effects)


def _newest(job: JobData) -> int:
    return job.progress.checkpoints[0].step if job.progress.checkpoints else 0
