"""How a job begins: its first ranks are placed and prepared, or those of a controller before this one are found again.

A part of the lifecycle, and pure like it.
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.events import types as events
from orchestrator.lifecycle import pausing, regroup
from orchestrator.lifecycle.commands import Command, Log, Place, Prepare, Reclaim
from orchestrator.lifecycle.recovery import RecoveryPlan
from orchestrator.lifecycle.regroup import Step, close, verdict
from orchestrator.lifecycle.states import (
    Failed,
    Order,
    Paused,
    Pending,
    Placing,
    Preparing,
    Reclaiming,
    Roster,
)
from orchestrator.lifecycle.stimuli import Placed, RankLost, Ready, Reclaimed, Start, Unplaceable


def start(order: Order, state: Pending, stimulus: Start) -> Step:
    """The controller is ready: for a new job, or one whose ranks may be training."""
    if order.roster is not None and order.roster.trained:
        roster = replace(order.roster, round=order.roster.round + 1)
        if roster.halted:
            return Paused(replace(roster, halted=False), roster.step), ()
        if not roster.members:
            return pausing.go_on(roster, roster.step), ()
        after, commands = _taken_over(order, Reclaiming(roster, roster.alive))
        return after, (Reclaim(roster.alive, roster.round), *commands)
    ranks = tuple(range(order.wanted))
    roster = Roster(
        plan=order.plan,
        schedule=order.schedule,
        members=ranks,
        starting=frozenset(ranks),
        next_rank=len(ranks),
        generation=order.generation - 1,
        version=order.plan.version - 1,
        step=order.checkpoints[0].step if order.checkpoints else 0,
        checkpoints=order.checkpoints,
        freeze=order.freezing.plans,
    )
    return Placing(roster), (Place(ranks),)


def placed(order: Order, state: Placing, stimulus: Placed) -> Step:
    """There is room."""
    return Preparing(state.roster), (Prepare(state.roster.members),)


def unplaceable(order: Order, state: Placing, stimulus: Unplaceable) -> Step:
    """There is not."""
    return close(Failed(stimulus.reason, user_error=True))


def ready(order: Order, state: Preparing, stimulus: Ready) -> Step:
    """One of the first ranks is up."""
    roster, log = welcome(state.roster, stimulus)
    after, commands = _prepared(order, roster)
    return after, (log, *commands)


def _prepared(order: Order, roster: Roster) -> Step:
    """One more of the first ranks is up, or will never be."""
    if roster.starting:
        return Preparing(roster), ()
    if roster.alive != frozenset(roster.members):
        return regroup.assess(order, roster, ())
    recovery_plan = RecoveryPlan(
        cause="start",
        reason=order.plan.reason,
        lineup=roster.members,
        step=roster.step,
        checkpoints=order.checkpoints,
        reached=roster.step,
    )
    return regroup.plan(order, roster, recovery_plan)


def lost_preparing(order: Order, state: Preparing, stimulus: RankLost) -> Step:
    """One of the first ranks will never be up: the others may do."""
    if not stimulus.dead or order.elastic.redundancy == "none" or order.wanted == 1:
        closing, commands = close(verdict(stimulus))
        return closing, (regroup.log_loss(stimulus), *commands)
    after, commands = _prepared(order, regroup.without(state.roster, stimulus.rank))
    return after, (regroup.log_loss(stimulus), *commands)


def welcome(roster: Roster, ready: Ready) -> tuple[Roster, Log]:
    """`roster` with a rank that is up."""
    log = Log(events.RankStarted(rank=ready.rank, node=ready.node, host=ready.host, pid=ready.pid))
    roster = replace(
        roster,
        alive=roster.alive | {ready.rank},
        starting=roster.starting - {ready.rank},
        nodes={**roster.nodes, ready.rank: ready.node},
        hosts={**roster.hosts, ready.rank: ready.host},
    )
    return roster, log


def reclaimed(order: Order, state: Reclaiming, stimulus: Reclaimed) -> Step:
    """A rank of the controller before this one answers."""
    roster = replace(
        state.roster,
        nodes={**state.roster.nodes, stimulus.rank: stimulus.node},
        hosts={**state.roster.hosts, stimulus.rank: stimulus.host},
    )
    return _taken_over(order, replace(state, roster=roster, waiting=state.waiting - {stimulus.rank}))


def lost_reclaiming(order: Order, state: Reclaiming, stimulus: RankLost) -> Step:
    """One of them is gone."""
    roster = regroup.without(state.roster, stimulus.rank)
    waiting = state.waiting - {stimulus.rank}
    return _taken_over(order, Reclaiming(roster, waiting, (*state.losses, stimulus)))


def _taken_over(order: Order, state: Reclaiming) -> Step:
    """One more rank of the controller before this one was heard of."""
    if state.waiting:
        return state, ()
    if not frozenset(state.roster.members) <= state.roster.alive:
        return regroup.assess(order, state.roster, state.losses)
    after, commands = regroup.train(order, state.roster, step=state.roster.step, under_way=True)
    void: tuple[Command, ...] = ()
    if state.roster.prepared is not None:
        text = "layers were to move when the controller was lost: they may yet, or in part; ask again for the rest"
        void = (Log(events.Warned(text=text)),)
    return after, (*map(regroup.log_loss, state.losses), *void, *commands)
