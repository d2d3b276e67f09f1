"""Joins and drains: free capacity, new ranks, whether a regroup pays, and preemption notices.

A part of the lifecycle, and pure.
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.events import types as events
from orchestrator.lifecycle import in_training, planned_change, regroup, scaling, startup
from orchestrator.lifecycle.effects import AppendToLog, AwaitCopies, Effect, Recruit, Step
from orchestrator.lifecycle.states import Assessed, Order, Own, Stopping, Training, Waiting
from orchestrator.lifecycle.stimuli import Going, Ready, Room, Weighed
from workers.protocol.reports import NoticeReport


def room(order: Order, state: Own, stimulus: Room) -> Step[Own]:
    """Start ranks where there is room: for missing places and for spares."""
    job = state.job
    up = len(job.membership.alive - job.membership.going) + len(job.membership.starting)
    size = scaling.size_of(order, job)
    grows = order.elastic.grow or isinstance(state, Waiting) or job.intents.scaling is not None
    wanted = (size.places if grows else min(size.places, len(job.membership.members))) + size.spares
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
    return replace(state, job=job), (AppendToLog(events.Placing(ranks=ranks)), Recruit(ranks))


def newcomer(order: Order, state: Own, stimulus: Ready) -> Step[Own]:
    """A new rank is up: a training job asks whether to include it."""
    job, log = startup.welcome(state.job, stimulus)
    job, effects = in_training.consider(order, job) if isinstance(state, Training) else (job, ())
    return replace(state, job=job), (log, *effects)


def newcomer_while_waiting(order: Order, state: Waiting, stimulus: Ready) -> Step[Waiting | Assessed]:
    """A new rank is up: the job may go on."""
    state, log = newcomer(order, state, stimulus)
    after, effects = go_on(order, state)
    return after, (*log, *effects)


def go_on(order: Order, state: Waiting) -> Step[Waiting | Assessed]:
    """A waiting job goes on once no rank is starting any more, if there are enough ranks."""
    job = state.job
    if job.membership.starting or len(job.membership.alive - job.membership.going) < order.elastic.min_ranks:
        return state, ()
    asked = "capacity" if job.membership.members else "resume"
    return regroup.assess(order, replace(job, intents=replace(job.intents, asked=asked)), ())


def weighed(order: Order, state: Training, stimulus: Weighed) -> Step[Training]:
    """If it pays, ask the ranks to regroup at their next commit."""
    job, packs = state.job, in_training.to_pack(order, state.job)
    told = events.LayoutWeighed(prefix=stimulus.prefix, pays=stimulus.pays, reason=stimulus.reason)
    log: tuple[Effect, ...] = (AppendToLog(told),) if packs else ()
    if job.intents.asked is not None:
        return state, log
    if not stimulus.pays:
        job = replace(job, progress=replace(job.progress, packed_for=stimulus.prefix))
        # The prefix may have moved meanwhile.
        again = in_training.weigh(order, job) if in_training.to_pack(order, job) else ()
        return replace(state, job=job), (*log, *again)
    wanted = scaling.size_of(order, job).places
    job, effects = planned_change.begin(order, job, "pack" if packs else "join", wanted)
    return replace(state, job=job), (*log, *effects)


def noticed(order: Order, state: Own, report: NoticeReport) -> Step[Own]:
    """A rank received a preemption notice, for its node or for itself."""
    job = state.job
    if report.source == "sigterm" and report.rank not in job.membership.alive | job.membership.starting:
        return state, ()  # its process ends, as it was told to
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
    after, effects = leaving(order, state, going)
    return after, (AppendToLog(report), *effects)


def leaving(order: Order, state: Own, stimulus: Going) -> Step[Own]:
    """Drain ranks: those with a place hand their layers over at the next commit, before their time is up."""
    known = stimulus.ranks & (state.job.membership.alive | state.job.membership.starting)
    job = in_training.with_drain(state.job, stimulus.id, stimulus.node, known)
    state = replace(state, job=job)
    if known and known <= job.membership.going and not stimulus.id:
        return state, ()
    ranks = known - job.membership.going
    notice = events.Noticed(
        node=stimulus.node,
        host=stimulus.host,
        source=stimulus.source,
        ranks=tuple(sorted(stimulus.ranks)),
        left_s=stimulus.left_s,
        id=stimulus.id,
    )
    patience_s = planned_change.patience_s(job, stimulus.left_s)
    there = job.membership
    hurried = there.hurried if patience_s else there.hurried | ranks
    job = replace(job, membership=replace(there, going=there.going | ranks, hurried=hurried))
    effects: tuple[Effect, ...] = ()
    timer = (AwaitCopies(patience_s, ranks),) if patience_s and ranks else ()
    if ranks and isinstance(state, Training | Stopping):
        job, effects = in_training.send_off(order, job)
        job, ending = planned_change.let_go(order, job)
        effects = (*effects, *ending)
    job, drained = in_training.drained(job)
    return replace(state, job=job), (AppendToLog(notice), *timer, *effects, *drained)
