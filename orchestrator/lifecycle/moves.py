"""A move of layers from its beginning to its end: the part of the lifecycle that needs no other generation. Pure.

The plans on the way are issued one by one: each once every rank has told that it follows the one before. The end of the
generation voids what is left of them.
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.events import types as events
from orchestrator.lifecycle.commands import Ask, Command, Log, Switch
from orchestrator.lifecycle.migration import Migration, Move, arrivals, moved_layers, path
from orchestrator.lifecycle.recovery import RecoveryPlan
from orchestrator.lifecycle.states import Order, Roster
from planner.ir import Schedule
from planner.plan import Plan
from workers.protocol import Report, Request, StepReport, SwitchReport

Moving = tuple[Roster, tuple[Command, ...]]


def begin(order: Order, roster: Roster, move: Move) -> Moving:
    """Have the ranks follow another plan."""
    if roster.asked is not None or roster.pausing or roster.going:
        return roster, (_warn("the ranks are about to regroup: the move of layers is not begun"),)
    plans = path(roster.plan, move.plan)
    if not plans:
        return roster, (_warn("the ranks follow that plan already: nothing moves"),)
    roster, void = voided(roster, "another one takes its place")
    migration = Migration(move=move, path=plans, began=roster.step, now=roster.plan)
    roster = replace(roster, migration=migration)
    commands = void
    if move.mode == "deferred" and (held := arrivals(roster.plan, move.plan)):
        layers = ", ".join(str(layer) for layer in sorted({layer for layer, _ in held}))
        commands = (
            *void,
            _warn(
                f'updates of layers {layers} are held while they move (elastic.migration = "deferred"): the weights'
                " are no longer those of a quiet run"
            ),
        )
    if move.mode == "stop":
        return replace(roster, asked="move"), (*commands, Ask(Request.REGROUP, roster.members[0]))
    roster, more = _issue(order, roster)
    return roster, (*commands, *more)


def _issue(order: Order, roster: Roster) -> Moving:
    """The next plan is logged before it is sent."""
    migration = roster.migration
    assert migration is not None
    plan = numbered(order, roster, migration.path[0], migration.move.plan.reason)
    migration = replace(migration, path=(plan, *migration.path[1:]), reached=frozenset())
    roster = replace(roster, migration=migration, version=plan.version)
    held: tuple[tuple[int, int], ...] = ()
    if migration.move.mode == "deferred" and plan.layers == migration.now.layers:
        held = arrivals(migration.now, migration.move.plan)
    same = plan.layers == roster.plan.layers and plan.schedule == roster.plan.schedule
    schedule = roster.schedule if same else migration.move.schedule
    switch = Switch(plan, schedule, held, roster.members)
    return roster, (Log(events.Issued(plan=plan)), switch)


def numbered(order: Order, roster: Roster, plan: Plan, reason: str) -> Plan:
    """`plan` as the next one of this controller."""
    return replace(plan, epoch=order.epoch, version=roster.version + 1, reason=reason)


def heard(order: Order, roster: Roster, report: Report) -> Moving:
    """What a report means for the move that is under way."""
    migration = roster.migration
    if migration is None:
        return (_followed(roster, report) if isinstance(report, SwitchReport) else roster), ()
    if isinstance(report, SwitchReport):
        return _switched(order, roster, migration, report)
    if not isinstance(report, StepReport):
        return roster, ()
    if migration.move.mode != "stop" or not migration.told:
        return replace(roster, migration=replace(migration, committed_s=report.committed_s)), ()
    # The first step of the generation that was formed for it.
    stall_s = max(0.0, report.committed_s - migration.committed_s - report.step_s)
    end_s = report.committed_s - report.step_s
    ended = _migrated(roster.plan.version, replace(migration, stall_s=stall_s), report.step - 1, end_s)
    return replace(roster, migration=None), (Log(ended),)


def _followed(roster: Roster, report: SwitchReport) -> Roster:
    """The ranks take up what the controller before this one had prepared."""
    if roster.prepared is None:
        return roster
    plan, schedule = roster.prepared
    if (report.epoch, report.version) != (plan.epoch, plan.version):
        return roster
    return replace(roster, plan=plan, schedule=schedule, prepared=None)


def _switched(order: Order, roster: Roster, migration: Migration, report: SwitchReport) -> Moving:
    plan = migration.path[0]
    if (report.epoch, report.version) != (plan.epoch, plan.version):
        return roster, ()
    migration = replace(
        migration,
        reached=migration.reached | {report.rank},
        # Under the first plan of the way; what came before that was for other reasons.
        bytes=migration.bytes
        + (0 if migration.told or roster.plan is migration.now else report.brought_bytes),
        stall_s=max(migration.stall_s, report.stall_s),
    )
    if len(migration.reached) < len(roster.members):
        return replace(roster, migration=migration), ()
    same = plan.layers == roster.plan.layers and plan.schedule == roster.plan.schedule
    schedule = roster.schedule if same else migration.move.schedule
    roster = replace(roster, plan=plan, schedule=schedule)
    logs: tuple[Command, ...] = ()
    if not migration.told and plan.layers == migration.move.plan.layers:
        logs = (Log(_migrated(plan.version, migration, report.step, report.switched_s)),)
        migration = replace(migration, told=True)
    left = migration.path[1:]
    if not left:
        return replace(roster, migration=None), logs
    roster, commands = _issue(order, replace(roster, migration=replace(migration, path=left)))
    return roster, (*logs, *commands)


def _migrated(version: int, migration: Migration, step: int, end_s: float) -> events.Migrated:
    now, then = migration.now, migration.move.plan
    layers = moved_layers(now, then)
    return events.Migrated(
        version=version,
        layers=layers,
        source=tuple(now.stage_ranks[now.stage_of_layer(layer)] for layer in layers),
        target=tuple(then.stage_ranks[then.stage_of_layer(layer)] for layer in layers),
        mode=migration.move.mode,
        bytes=None if migration.move.mode == "stop" else migration.bytes,
        seconds=max(0.0, end_s - migration.move.asked_s),
        steps=step - migration.began,
        stall_s=migration.stall_s,
        step=step,
    )


def ended(roster: Roster) -> Moving:
    """The generation is over, and with it the move: unless the generation ended for it."""
    roster = replace(roster, prepared=None)
    if roster.migration is not None and roster.migration.move.mode == "stop" and roster.asked == "move":
        return roster, ()
    return voided(roster, "the generation ended before they had moved")


def instead(
    order: Order, roster: Roster, recovery_plan: RecoveryPlan
) -> tuple[Roster, Plan, Schedule] | None:
    """What the next generation follows, if the one before ended for a move."""
    migration = roster.migration
    if migration is None or migration.told or not recovery_plan.keep_plan or recovery_plan.cause != "move":
        return None
    plan = numbered(order, roster, migration.move.plan, migration.move.plan.reason)
    roster = replace(roster, version=plan.version, migration=replace(migration, told=True))
    return roster, plan, migration.move.schedule


def voided(roster: Roster, why: str) -> Moving:
    """What is left of a move is void, and what it had not done has not happened."""
    migration = roster.migration
    if migration is None:
        return roster, ()
    roster = replace(roster, migration=None)
    if migration.told:
        return roster, ()
    layers = ", ".join(map(str, moved_layers(migration.now, migration.move.plan)))
    return roster, (_warn(f"the move of layers {layers} is void: {why}"),)


def _warn(text: str) -> Log:
    return Log(events.Warned(text=text))
