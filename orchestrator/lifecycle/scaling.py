"""Another number of ranks on request: the ranks regroup for it at a commit, or once there are enough. Pure.

A part of the lifecycle. Does not know whether the cluster has room or a plan fits: whoever posts the request has
checked that. If the room is gone before the ranks are up, the job keeps the size that it had.
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.events.types import Dismissed, Scaled
from orchestrator.lifecycle import planned_change
from orchestrator.lifecycle.answers import answer
from orchestrator.lifecycle.effects import AppendToLog, AwaitRanks, Dismiss, Effect
from orchestrator.lifecycle.states import JobData, Order, Resize, TargetSize
from orchestrator.lifecycle.stimuli import RanksOverdue, ScaleRequested
from planner.wording import counted

Scaling = tuple[JobData, tuple[Effect, ...]]

LEAST_S = 60.0
"""Time limit for requested ranks to come up where `elastic.wait_s` is less: a job that waits for none after a failure
may still be given more."""


def size_asked(event: Scaled) -> TargetSize:
    """The size that a request asks for."""
    return TargetSize(places=event.places, spares=event.spares, pipelines=event.pipelines)


def size_of(order: Order, job: JobData) -> TargetSize:
    """The size that the job is to have: as requested last, else as ordered."""
    return job.membership.size or TargetSize(places=order.wanted, spares=order.elastic.spares)


def begin(order: Order, job: JobData, stimulus: ScaleRequested) -> Scaling:
    """Log the request; the job pursues it from now on."""
    event, earlier, members = stimulus.event, job.intents.scaling, len(job.membership.members)
    now, size = size_of(order, job), size_asked(event)
    effects: list[Effect] = []
    if stimulus.resizes and earlier is not None and earlier.id:
        effects.append(answer(job, earlier.id, False, "another scale took its place"))
    effects.append(AppendToLog(event))
    job = replace(job, membership=replace(job.membership, size=size))
    if stimulus.resizes and not _has(job, size):
        # The controller that takes over finds the requested size in the log already.
        before = (
            earlier.before if earlier is not None else replace(now, places=members) if now == size else now
        )
        resize = Resize(id=stimulus.id, before=before)
        if members < size.places or size.pipelines:
            effects.append(AwaitRanks(_patience_s(order), stimulus.id))
        return replace(job, intents=replace(job.intents, scaling=resize)), tuple(effects)
    if stimulus.id:
        said = f"keeps {counted(size.spares, 'spare rank')} from now on"
        effects.append(answer(job, stimulus.id, True, said))
    if stimulus.resizes:
        job = replace(job, intents=replace(job.intents, scaling=None))
    elif earlier is not None:
        kept = replace(earlier, before=replace(earlier.before, spares=size.spares))
        job = replace(job, intents=replace(job.intents, scaling=kept))
    return job, tuple(effects)


def overdue(order: Order, job: JobData, stimulus: RanksOverdue, *, trains: bool) -> Scaling:
    """Keep the size from before the request, if its ranks are not up in time.

    Args:
        trains: whether the job trains now; otherwise the regroup under way decides first.
    """
    resize, size, members = job.intents.scaling, size_of(order, job), len(job.membership.members)
    if resize is None or resize.id != stimulus.id or _has(job, size):
        return job, ()
    if members >= size.places and not size.pipelines:
        return job, ()
    coming = job.intents.change is not None and job.intents.change.cause == "scale"
    if not trains or job.intents.asked == "scale" or coming:
        return job, (AwaitRanks(_patience_s(order), stimulus.id),)
    before = resize.before
    job = replace(
        job,
        membership=replace(job.membership, size=before),
        intents=replace(job.intents, scaling=None),
    )
    kept = Scaled(
        ranks=before.places // (before.pipelines or order.plan.pipeline_count),
        spares=before.spares,
        places=before.places,
        id="",
        pipelines=before.pipelines,
    )
    up = members + len(job.membership.idle)
    why = (
        f"{up} of {counted(size.places, 'rank')} were up after {_patience_s(order):g} s (elastic.wait_s, at least"
        f" {LEAST_S:g}): the room that the cluster had is gone. The job trains on with {counted(members, 'rank')};"
        " add nodes, then ask again"
    )
    answers = (answer(job, resize.id, False, why),) if resize.id else ()
    return job, (AppendToLog(kept), *answers)


def _patience_s(order: Order) -> float:
    return max(order.elastic.wait_s, LEAST_S)


def pursue(order: Order, job: JobData, size: TargetSize) -> Scaling:
    """Have training ranks regroup if the job can have the requested number of places now; release idle ranks that it
    does not need."""
    there = job.membership
    if job.intents.asked is not None or job.intents.pausing:
        return job, ()
    if job.intents.scaling is not None and not _has(job, size):
        enough = not there.starting and len(there.members) + len(there.idle) >= size.places
        if enough or len(there.members) > size.places:
            return planned_change.begin(order, job, "scale", size.places)
    if job.intents.change is not None and job.intents.change.cause == "scale":
        job = replace(job, intents=replace(job.intents, change=None))
    if not (released := excess(job, size)):
        return job, ()
    job = replace(job, membership=replace(there, alive=there.alive - {*released}))
    return job, (AppendToLog(Dismissed(ranks=released)), Dismiss(frozenset(released)))


def _has(job: JobData, size: TargetSize) -> bool:
    """Whether the generation has the requested size."""
    formed = size.pipelines in (0, job.progress.plan.pipeline_count)
    return formed and len(job.membership.members) == size.places


def excess(job: JobData, size: TargetSize) -> tuple[int, ...]:
    """The idle ranks that are more than places and spares together, the newest first."""
    there = job.membership
    more = len(there.alive - there.going) + len(there.starting) - size.places - size.spares
    return tuple(sorted(there.idle, reverse=True)[: max(0, more)])


def answered(job: JobData, size: TargetSize, *, last: bool) -> Scaling:
    """Answer the request if the new generation has the requested size.

    Args:
        last: whether the ranks regrouped for it: it is not tried again.
    """
    resize, places = job.intents.scaling, len(job.membership.members)
    if resize is None or not (last or _has(job, size)):
        return job, ()
    job, id = replace(job, intents=replace(job.intents, scaling=None)), resize.id
    if not id:
        return job, ()
    if _has(job, size):
        forming = f" in {counted(size.pipelines, 'pipeline')}" if size.pipelines else ""
        return job, (answer(job, id, True, f"trains on with {counted(places, 'rank')}{forming}"),)
    why = f"the plan for {counted(size.places, 'rank')} has places for {places}"
    return job, (answer(job, id, False, f"trains on with {counted(places, 'rank')}: {why}"),)
