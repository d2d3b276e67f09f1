"""Ranks that come, and ranks that are to go: where there is room, who is up, whether it pays, who was told to leave.

A part of the lifecycle, and pure like it.
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
    """Ranks are started where there is room: for the places that are missing, and for spares."""
    roster = state.roster
    up = len(roster.alive - roster.going) + len(roster.starting)
    grows = order.elastic.grow or isinstance(state, Waiting)
    wanted = (order.wanted if grows else min(order.wanted, len(roster.members))) + order.elastic.spares
    count = min(stimulus.ranks, wanted - up)
    if count <= 0:
        return state, ()
    ranks = tuple(range(roster.next_rank, roster.next_rank + count))
    roster = replace(roster, starting=roster.starting | frozenset(ranks), next_rank=ranks[-1] + 1)
    return replace(state, roster=roster), (Recruit(ranks),)


def newcomer(order: Order, state: Live, stimulus: Ready) -> Step:
    """A rank that was called is up: a job that waits goes on, one that trains asks whether to take it in."""
    roster, log = startup.welcome(state.roster, stimulus)
    state = replace(state, roster=roster)
    if isinstance(state, Waiting):
        after, commands = go_on(order, state)
        return after, (log, *commands)
    return state, (log, *(regroup.weigh(order, roster) if isinstance(state, Training) else ()))


def go_on(order: Order, state: Waiting) -> Step:
    """A job that waits goes on once all who were called have come or never will, if they are enough."""
    roster = state.roster
    if roster.starting or len(roster.alive - roster.going) < order.elastic.min_ranks:
        return state, ()
    asked = "capacity" if roster.members else "resume"
    return regroup.assess(order, replace(roster, asked=asked), ())


def weighed(order: Order, state: Training, stimulus: Weighed) -> Step:
    """If it pays, the ranks are to regroup at their next commit."""
    if not stimulus.pays or state.roster.asked is not None:
        return state, ()
    roster = replace(state.roster, asked="join")
    return replace(state, roster=roster), (Ask(Request.REGROUP, roster.members[0]),)


def noticed(order: Order, state: Live, report: NoticeReport) -> Step:
    """A rank heard that its node is to go, or that it is itself."""
    roster = state.roster
    # One that is on its way up has told of no home yet.
    node, host = report.node or roster.nodes.get(report.rank, ""), roster.hosts.get(report.rank, "")
    ranks = frozenset({report.rank})
    if report.source != "sigterm":
        ranks |= frozenset(rank for rank, where in roster.nodes.items() if where == node)
    going = Going(ranks & (roster.alive | roster.starting), report.source, report.left_s, node, host)
    after, commands = are_to_go(order, state, going)
    return after, (Log(report), *commands)


def are_to_go(order: Order, state: Live, stimulus: Going) -> Step:
    """Ranks are to go: those with a place hand their layers over at the next commit, before their time is up."""
    roster = state.roster
    known = stimulus.ranks & (roster.alive | roster.starting)
    if known and known <= roster.going:
        return state, ()
    ranks = known - roster.going
    notice = events.Noticed(
        node=stimulus.node,
        host=stimulus.host,
        source=stimulus.source,
        ranks=tuple(sorted(stimulus.ranks)),
        left_s=stimulus.left_s,
    )
    roster = replace(roster, going=roster.going | ranks)
    state = replace(state, roster=roster)
    if not ranks or not isinstance(state, Training | Stopping):
        return state, (Log(notice),)
    roster, commands = regroup.send_off(order, roster)
    return replace(state, roster=roster), (Log(notice), *commands)
