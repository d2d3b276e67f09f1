"""Startup: the first ranks are placed and prepared, or those of the previous controller are found again.

A part of the lifecycle, and pure.
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.events import types as events
from orchestrator.lifecycle import ending, in_training, pausing, regroup
from orchestrator.lifecycle.effects import AppendToLog, Effect, Prepare, Reclaim, Reserve, Step
from orchestrator.lifecycle.ending import close, verdict
from orchestrator.lifecycle.recovery import RecoveryPlan
from orchestrator.lifecycle.states import (
    Assessed,
    Closing,
    Intents,
    JobData,
    JobFailed,
    JobPaused,
    JobPlacing,
    Loading,
    Membership,
    Order,
    Pending,
    Planning,
    Preparing,
    Progress,
    Reclaiming,
    Stopping,
    Training,
    Waiting,
)
from orchestrator.lifecycle.stimuli import Placed, RankLost, Ready, Reclaimed, Start, Unplaceable


def start(
    order: Order, state: Pending, stimulus: Start
) -> Step[JobPlacing | Reclaiming | Assessed | Training | Stopping | JobPaused | Waiting]:
    """The controller is ready: for a new job, or one whose ranks may be training."""
    if order.earlier is not None and order.earlier.progress.trained:
        job = replace(
            order.earlier, progress=replace(order.earlier.progress, round=order.earlier.progress.round + 1)
        )
        if job.progress.halted:
            return JobPaused(
                replace(job, progress=replace(job.progress, halted=False)), job.progress.step
            ), ()
        if not job.membership.members:
            return pausing.go_on(job, job.progress.step), ()
        after, effects = _taken_over(order, Reclaiming(job, job.membership.alive))
        return after, (Reclaim(job.membership.alive, job.progress.round), *effects)
    ranks = tuple(range(order.wanted))
    step = order.checkpoints[0].step if order.checkpoints else 0
    prefix = order.freezing.prefix_after(step)
    job = JobData(
        progress=Progress(
            plan=order.plan,
            schedule=order.schedule,
            generation=order.generation - 1,
            version=order.plan.version - 1,
            step=step,
            prefix_told=0 if prefix is None else prefix.step,
            frozen=0 if prefix is None else prefix.layers,
            checkpoints=order.checkpoints,
            freeze=order.freezing.plans,
        ),
        intents=Intents(proposed=order.freezing.proposed),
        membership=Membership(members=ranks, starting=frozenset(ranks), next_rank=len(ranks)),
    )
    return JobPlacing(job), (AppendToLog(events.Placing(ranks=ranks)), Reserve(ranks))


def placed(order: Order, state: JobPlacing, stimulus: Placed) -> Step[Preparing]:
    """The resources are reserved: prepare the ranks."""
    return Preparing(state.job), (Prepare(state.job.membership.members),)


def unplaceable(order: Order, state: JobPlacing, stimulus: Unplaceable) -> Step[Closing]:
    """There is no room: the job fails."""
    return close(JobFailed(stimulus.reason, user_error=True))


def ready(order: Order, state: Preparing, stimulus: Ready) -> Step[Preparing | Assessed | Planning | Loading]:
    """One of the first ranks is up."""
    job, log = welcome(state.job, stimulus)
    after, effects = _prepared(order, job)
    return after, (log, *effects)


def _prepared(order: Order, job: JobData) -> Step[Preparing | Assessed | Planning | Loading]:
    """Go on once each of the first ranks is up or has failed."""
    if job.membership.starting:
        return Preparing(job), ()
    if job.membership.alive != frozenset(job.membership.members):
        return regroup.assess(order, job, ())
    recovery_plan = RecoveryPlan(
        cause="start",
        reason=order.plan.reason,
        lineup=job.membership.members,
        step=job.progress.step,
        checkpoints=order.checkpoints,
        reached=job.progress.step,
    )
    return regroup.plan(order, job, recovery_plan)


def lost_preparing(
    order: Order, state: Preparing, stimulus: RankLost
) -> Step[Preparing | Assessed | Planning | Loading | Closing]:
    """One of the first ranks failed to start: the others may be enough."""
    if not stimulus.dead or order.elastic.redundancy == "none" or order.wanted == 1:
        closing, effects = close(verdict(stimulus))
        return closing, (ending.log_loss(stimulus), *effects)
    after, effects = _prepared(order, in_training.without(state.job, stimulus.rank))
    return after, (ending.log_loss(stimulus), *effects)


def welcome(job: JobData, ready: Ready) -> tuple[JobData, AppendToLog]:
    """Return `job` with a rank that is up."""
    up = events.RankStarted(
        rank=ready.rank,
        node=ready.node,
        host=ready.host,
        pid=ready.pid,
        zone=ready.zone,
        machine=ready.machine,
    )
    job = replace(
        job,
        membership=replace(
            job.membership,
            alive=job.membership.alive | {ready.rank},
            starting=job.membership.starting - {ready.rank},
            nodes={**job.membership.nodes, ready.rank: ready.node},
            zones={**job.membership.zones, ready.node: ready.zone},
            hosts={**job.membership.hosts, ready.rank: ready.host},
        ),
    )
    return job, AppendToLog(up)


def reclaimed(
    order: Order, state: Reclaiming, stimulus: Reclaimed
) -> Step[Reclaiming | Assessed | Training | Stopping]:
    """A rank of the previous controller answers."""
    job = replace(
        state.job,
        membership=replace(
            state.job.membership,
            nodes={**state.job.membership.nodes, stimulus.rank: stimulus.node},
            hosts={**state.job.membership.hosts, stimulus.rank: stimulus.host},
        ),
    )
    return _taken_over(order, replace(state, job=job, waiting=state.waiting - {stimulus.rank}))


def lost_reclaiming(
    order: Order, state: Reclaiming, stimulus: RankLost
) -> Step[Reclaiming | Assessed | Training | Stopping]:
    """A rank of the previous controller is gone."""
    job = in_training.without(state.job, stimulus.rank)
    waiting = state.waiting - {stimulus.rank}
    return _taken_over(order, Reclaiming(job, waiting, (*state.losses, stimulus)))


def _taken_over(order: Order, state: Reclaiming) -> Step[Reclaiming | Assessed | Training | Stopping]:
    """Go on once each rank of the previous controller has answered or is gone."""
    if state.waiting:
        return state, ()
    if not frozenset(state.job.membership.members) <= state.job.membership.alive:
        return regroup.assess(order, state.job, state.losses)
    after, effects = in_training.train(order, state.job, step=state.job.progress.step, under_way=True)
    void: tuple[Effect, ...] = ()
    if state.job.progress.prepared is not None:
        text = "layers were moving when the controller failed: ask again for those that do not arrive"
        void = (AppendToLog(events.Warned(text=text)),)
    return after, (*map(ending.log_loss, state.losses), *void, *effects)
