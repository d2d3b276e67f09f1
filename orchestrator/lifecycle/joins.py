"""Joins and drains: free capacity, new ranks, whether a regroup pays, and preemption notices.

A part of the lifecycle, and pure.
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.events import types as events
from orchestrator.lifecycle import regroup, startup
from orchestrator.lifecycle.commands import Ask, Log, Recruit
from orchestrator.lifecycle.regroup import Step
from orchestrator.lifecycle.states import Live, Order, Stopping, Training, Waiting
from orchestrator.lifecycle.stimuli import Going, Ready, Room, Weighed
from workers.protocol import NoticeReport, Request


def room(order: Order, state: Training | Waiting, stimulus: Room) -> Step:
    """Start ranks where there is room: for missing places and for spares."""
    job = state.job
    up = len(job.membership.alive - job.membership.going) + len(job.membership.starting)
    grows = order.elastic.grow or isinstance(state, Waiting)
    wanted = (
        order.wanted if grows else min(order.wanted, len(job.membership.members))
    ) + order.elastic.spares
    count = min(stimulus.ranks, wanted - up)
    if count <= 0:
        return state, ()
    ranks = tuple(range(job.membership.next_rank, job.membership.next_rank + count))
    job = replace(
        job,
        membership=replace(
            job.membership, starting=job.membership.starting | frozenset(ranks), next_rank=ranks[-1] + 1
        ),
    )
    return replace(state, job=job), (Log(events.Placing(ranks=ranks)), Recruit(ranks))


def newcomer(order: Order, state: Live, stimulus: Ready) -> Step:
    """A new rank is up: a waiting job may go on, a training job asks whether to include the rank."""
    job, log = startup.welcome(state.job, stimulus)
    state = replace(state, job=job)
    if isinstance(state, Waiting):
        after, commands = go_on(order, state)
        return after, (log, *commands)
    return state, (log, *(regroup.weigh(order, job) if isinstance(state, Training) else ()))


def go_on(order: Order, state: Waiting) -> Step:
    """A waiting job goes on once no rank is starting any more, if there are enough ranks."""
    job = state.job
    if job.membership.starting or len(job.membership.alive - job.membership.going) < order.elastic.min_ranks:
        return state, ()
    asked = "capacity" if job.membership.members else "resume"
    return regroup.assess(order, replace(job, intents=replace(job.intents, asked=asked)), ())


def weighed(order: Order, state: Training, stimulus: Weighed) -> Step:
    """If it pays, ask the ranks to regroup at their next commit."""
    if not stimulus.pays or state.job.intents.asked is not None:
        return state, ()
    job = replace(state.job, intents=replace(state.job.intents, asked="join"))
    return replace(state, job=job), (Ask(Request.REGROUP, job.membership.members[0]),)


def noticed(order: Order, state: Live, report: NoticeReport) -> Step:
    """A rank received a preemption notice, for its node or for itself."""
    job = state.job
    # A rank that is still starting has not reported its node yet.
    node, host = (
        report.node or job.membership.nodes.get(report.rank, ""),
        job.membership.hosts.get(report.rank, ""),
    )
    ranks = frozenset({report.rank})
    if report.source != "sigterm":
        ranks |= frozenset(rank for rank, where in job.membership.nodes.items() if where == node)
    going = Going(
        ranks & (job.membership.alive | job.membership.starting), report.source, report.left_s, node, host
    )
    after, commands = leaving(order, state, going)
    return after, (Log(report), *commands)


def leaving(order: Order, state: Live, stimulus: Going) -> Step:
    """Drain ranks: those with a place hand their layers over at the next commit, before their time is up."""
    job = state.job
    known = stimulus.ranks & (job.membership.alive | job.membership.starting)
    if known and known <= job.membership.going:
        return state, ()
    ranks = known - job.membership.going
    notice = events.Noticed(
        node=stimulus.node,
        host=stimulus.host,
        source=stimulus.source,
        ranks=tuple(sorted(stimulus.ranks)),
        left_s=stimulus.left_s,
    )
    job = replace(job, membership=replace(job.membership, going=job.membership.going | ranks))
    state = replace(state, job=job)
    if not ranks or not isinstance(state, Training | Stopping):
        return state, (Log(notice),)
    job, commands = regroup.send_off(order, job)
    return replace(state, job=job), (Log(notice), *commands)
