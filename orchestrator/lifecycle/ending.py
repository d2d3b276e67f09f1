"""A job that waits for capacity, saves what its ranks hold, or ends. A part of the lifecycle, and pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.events import types as events
from orchestrator.lifecycle.effects import AppendToLog, Release, Save, Step, Wait
from orchestrator.lifecycle.recovery import PauseDecided, Rescue
from orchestrator.lifecycle.states import Closing, JobData, JobFailed, JobFinished, Order, Saving, Waiting
from orchestrator.lifecycle.stimuli import RankLost
from planner.plan import Plan
from planner.wording import counted


def hold(order: Order, job: JobData, holding: PauseDecided) -> Step[Waiting | Saving | Closing]:
    """Wait for capacity, with one timeout per pause; meanwhile write what no checkpoint has."""
    job = replace(job, progress=replace(job.progress, interrupted=holding.interrupted))
    rescued = holding.rescue
    state = Waiting(job, holding.reason, holding.step, saving=rescued.step if rescued is not None else None)
    saving = (save(job, rescued),) if rescued is not None else ()
    if job.progress.out_of_patience:
        after, effects = out_of_patience(order, state)
        return after, (*saving, *effects)
    if job.progress.paused:
        return state, saving
    job = replace(job, progress=replace(job.progress, paused=True, pauses=job.progress.pauses + 1))
    paused = AppendToLog(
        events.Paused(
            reason=holding.reason,
            step=holding.step,
            failures=job.progress.failures,
            failed_at=job.progress.failed_at,
        )
    )
    return replace(state, job=job), (paused, *saving, Wait(order.elastic.wait_s, job.progress.pauses))


def out_of_patience(order: Order, state: Waiting) -> Step[Saving | Closing]:
    """End a job whose pause has lasted for `elastic.wait_s`."""
    waited = f"no capacity came within {order.elastic.wait_s:g} s (elastic.wait_s)"
    return end_waiting(state, f"{state.reason}; {waited}")


def end_waiting(state: Waiting, reason: str) -> Step[Saving | Closing]:
    """End a waiting job, once what its ranks hold is written.

    Args:
        reason: empty if a stop was requested.
    """
    saving = Saving(state.job, state.step, reason)
    return saved(saving) if state.saving is None else (saving, ())


def saved(state: Saving) -> Step[Closing]:
    """End the job: what could be written is in a checkpoint."""
    newest = state.job.progress.checkpoints[0].step if state.job.progress.checkpoints else 0
    reason = state.reason or "stopped while the job waited for capacity"
    if newest < state.step:
        lost = counted(state.step - newest, "committed step")
        way_out = (
            f"--resume goes on from the checkpoint of step {newest}"
            if newest
            else "there is no checkpoint: start the job again with another job.output"
        )
        return close(JobFailed(f"{reason}; {lost} could not be written: {way_out}", user_error=False))
    if not state.reason:
        return close(JobFinished(state.step, stopped=True, state_sha256=None))
    way_out = (
        f"The checkpoint of step {newest} stays: --resume goes on from it"
        if newest
        else "No step was committed, and there is no checkpoint: start the job again with the same spec"
    )
    return close(JobFailed(f"{reason}. {way_out}", user_error=False))


def save(job: JobData, rescue: Rescue) -> Save:
    """Return the effect that writes what `rescue` names."""
    return Save(rescue, job.progress.plan, job.progress.generation + 1)


def close(end: JobFinished | JobFailed) -> Step[Closing]:
    """Release everything, then end with `end`."""
    return Closing(end), (Release(),)


def verdict(loss: RankLost) -> JobFailed:
    """Return the end of a job that `loss` ends."""
    return JobFailed(f"rank {loss.rank}: {loss.error}", loss.user_error)


def log_loss(loss: RankLost) -> AppendToLog:
    """Return the log entry for `loss`."""
    return AppendToLog(events.RankFailed(rank=loss.rank, error=loss.error, details=loss.details))


def log_shortage(job: JobData, plan: Plan, members: Sequence[int], loss: RankLost) -> tuple[AppendToLog, ...]:
    """Return the log entry for the shortage of memory that `loss` is, if it is one.

    Args:
        plan: the plan that `members`, the ranks by place, followed or were to follow.
    """
    if loss.shortage is None or loss.rank not in members:
        return ()
    short = events.OutOfMemory(
        rank=loss.rank,
        place=members.index(loss.rank),
        plan=plan.key,
        step=job.progress.step,
        shortage=loss.shortage,
    )
    return (AppendToLog(short),)
