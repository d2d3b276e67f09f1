"""Another number of ranks on request: the ranks regroup for it at a commit, or once there are enough. Pure.

A part of the lifecycle. Does not know whether the cluster has room or a plan fits: whoever posts the request has
checked that.
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.events.types import Dismissed
from orchestrator.lifecycle.answers import answer
from orchestrator.lifecycle.commands import Ask, Command, Dismiss, Log
from orchestrator.lifecycle.states import Job, Order, Size
from orchestrator.lifecycle.stimuli import Scale
from planner.wording import counted
from workers.protocol import Request

Scaling = tuple[Job, tuple[Command, ...]]


def size_of(order: Order, job: Job) -> Size:
    """How many ranks the job is to have: as requested last, else as ordered."""
    return job.membership.size or Size(places=order.wanted, spares=order.elastic.spares)


def begin(order: Order, job: Job, stimulus: Scale) -> Scaling:
    """Log the request; the job pursues it from now on."""
    event, before = stimulus.event, job.intents.scaling if stimulus.resizes else None
    commands: list[Command] = []
    if before:
        commands.append(answer(job, before, False, "another scale took its place"))
    commands.append(Log(event))
    size = Size(places=event.places, spares=event.spares)
    job = replace(job, membership=replace(job.membership, size=size))
    if stimulus.resizes and len(job.membership.members) != size.places:
        return replace(job, intents=replace(job.intents, scaling=stimulus.id)), tuple(commands)
    if stimulus.id:
        said = f"keeps {counted(size.spares, 'spare rank')} from now on"
        commands.append(answer(job, stimulus.id, True, said))
    if stimulus.resizes:
        job = replace(job, intents=replace(job.intents, scaling=None))
    return job, tuple(commands)


def pursue(job: Job, size: Size) -> Scaling:
    """Have training ranks regroup if the job can have the requested number of places now; release idle ranks that it
    does not need."""
    there = job.membership
    if job.intents.asked is not None or job.intents.pausing:
        return job, ()
    if job.intents.scaling is not None and len(there.members) != size.places:
        enough = not there.starting and len(there.members) + len(there.idle) >= size.places
        if enough or len(there.members) > size.places:
            regroup = Ask(Request.REGROUP, there.members[0])
            return replace(job, intents=replace(job.intents, asked="scale")), (regroup,)
    if not (released := excess(job, size)):
        return job, ()
    job = replace(job, membership=replace(there, alive=there.alive - {*released}))
    return job, (Log(Dismissed(ranks=released)), Dismiss(frozenset(released)))


def excess(job: Job, size: Size) -> tuple[int, ...]:
    """The idle ranks that are more than places and spares together, the newest first."""
    there = job.membership
    more = len(there.alive - there.going) + len(there.starting) - size.places - size.spares
    return tuple(sorted(there.idle, reverse=True)[: max(0, more)])


def answered(job: Job, size: Size, *, last: bool) -> Scaling:
    """Answer the request if the new generation has the requested size.

    Args:
        last: whether the ranks regrouped for it: it is not tried again.
    """
    id, places = job.intents.scaling, len(job.membership.members)
    if id is None or not (last or places == size.places):
        return job, ()
    job = replace(job, intents=replace(job.intents, scaling=None))
    if not id:
        return job, ()
    if places == size.places:
        return job, (answer(job, id, True, f"trains on with {counted(places, 'rank')}"),)
    why = f"the plan for {counted(size.places, 'rank')} has places for {places}"
    return job, (answer(job, id, False, f"trains on with {counted(places, 'rank')}: {why}"),)
