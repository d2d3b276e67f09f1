"""Requests, drains and resizes of a generation, handled once it trains and at each change of its ranks.

A part of the lifecycle, and pure. How a generation comes about is in `regroup.py`.
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.lifecycle import planned_change, scaling
from orchestrator.lifecycle.answers import answer
from orchestrator.lifecycle.effects import Ask, Dismiss, Effect, Propose, Step, Train, Weigh
from orchestrator.lifecycle.states import JobData, Leaving, Order, Stopping, Training
from workers.protocol.orders import Request


def train(order: Order, job: JobData, *, step: int, under_way: bool = False) -> Step[Training | Stopping]:
    """Have the members train, and repeat the requests that earlier generations did not get to."""
    members = job.membership.members
    effects: list[Effect] = [Train(members, step, job.progress.round, under_way)]
    if job.intents.proposed is not None:
        effects.append(Propose(job.intents.proposed, members))
    if job.intents.save_after is not None:
        effects.append(Ask(Request.CHECKPOINT, members[0]))
        job = replace(job, intents=replace(job.intents, save_after=step))
    if job.intents.stopping:
        effects.append(Ask(Request.STOP, members[0]))
    job, asking = ask_pause(job)
    job, leaving = send_off(order, job)
    job, gone = drained(job)
    effects += [*asking, *leaving, *gone]
    if job.intents.stopping:
        return Stopping(job, frozenset(members)), tuple(effects)
    job, resizing = consider(order, job)
    return Training(job, frozenset(members)), (*effects, *resizing)


def ask_pause(job: JobData) -> tuple[JobData, tuple[Effect, ...]]:
    """Have the ranks end their generation if a pause was requested."""
    if not job.intents.halting or job.intents.stopping or job.intents.pausing:
        return job, ()
    return replace(job, intents=replace(job.intents, pausing=True)), (
        Ask(Request.STOP, job.membership.members[0]),
    )


def send_off(order: Order, job: JobData) -> tuple[JobData, tuple[Effect, ...]]:
    """Release draining ranks: idle ones at once, members at a regroup. If no rank would be left, they end as
    for a stop, with a checkpoint of that step."""
    free = job.membership.going - frozenset(job.membership.members)
    effects: tuple[Effect, ...] = (Dismiss(free),) if free else ()
    for rank in free:
        job = without(job, rank)
    if not job.membership.going or job.intents.asked == "drain" or job.intents.pausing:
        return job, effects
    if job.membership.alive - job.membership.going:
        if job.intents.stopping:
            return job, effects
        job, changing = planned_change.begin(order, job, "drain", scaling.size_of(order, job).places)
        return job, (*effects, *changing)
    first = job.membership.members[0]
    return replace(job, intents=replace(job.intents, pausing=True)), (*effects, Ask(Request.STOP, first))


def with_drain(job: JobData, id: str, node: str, ranks: frozenset[int]) -> JobData:
    """`job` with the drain that the command `id` requested; without an id nobody waits for its end."""
    if not id:
        return job
    leaving = (*job.intents.leaving, Leaving(id=id, node=node, ranks=ranks))
    return replace(job, intents=replace(job.intents, leaving=leaving))


def drained(job: JobData) -> tuple[JobData, tuple[Effect, ...]]:
    """Answer the requested drains whose ranks are all gone."""
    there = job.membership.alive | job.membership.starting
    over = tuple(drain for drain in job.intents.leaving if drain.ranks.isdisjoint(there))
    left = tuple(drain for drain in job.intents.leaving if drain not in over)
    answers = (
        answer(job, drain.id, True, f"node {drain.node[:12]} has no rank of the job any more")
        for drain in over
    )
    return replace(job, intents=replace(job.intents, leaving=left)), tuple(answers)


def consider(order: Order, job: JobData) -> tuple[JobData, tuple[Effect, ...]]:
    """Have training ranks regroup to the size that was requested, or ask whether to include idle ranks."""
    job, leaving = send_off(order, job)
    job, effects = scaling.pursue(order, job, scaling.size_of(order, job))
    job, ending = planned_change.let_go(order, job)
    return job, (*leaving, *effects, *ending, *weigh(order, job))


def weigh(order: Order, job: JobData) -> tuple[Effect, ...]:
    """Ask whether to include idle ranks, and whether layers frozen since then are worth another layout, once no rank is
    starting any more."""
    there, progress = job.membership, job.progress
    if there.starting or job.intents.asked or job.intents.change:
        return ()
    ranks = (*there.members, *sorted(there.idle))[: scaling.size_of(order, job).places]
    grows = order.elastic.grow and len(ranks) > len(there.members)
    if not grows and not to_pack(order, job):
        return ()
    domains = tuple(map(there.domain, ranks))
    return (Weigh(progress.plan, tuple(ranks), domains, progress.step, progress.round, progress.prefix_told),)


def to_pack(order: Order, job: JobData) -> bool:
    """Whether layers have been frozen, or are trained again, since another layout was weighed."""
    return order.packs and job.progress.packed_for != job.progress.prefix_told


def without(job: JobData, rank: int) -> JobData:
    """Return `job` without a rank that is gone; the rank stays in `members` until the next generation."""
    one, change = {rank}, job.intents.change
    if change is not None and rank in change.lineup:
        change = None
    return replace(
        job,
        intents=replace(job.intents, change=change),
        membership=replace(
            job.membership,
            alive=job.membership.alive - one,
            starting=job.membership.starting - one,
            going=job.membership.going - one,
            hurried=job.membership.hurried - one,
        ),
    )
