"""A move of layers from the request to its end, within one generation. A part of the lifecycle, and pure.

The plans on the way are issued one by one, each once every rank has reported that it follows the one before.
The end of the generation cancels the rest.
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.events import types as events
from orchestrator.lifecycle.commands import Ask, Command, Log, Switch
from orchestrator.lifecycle.migration import Migration, Move, arrivals, moved_layers, path
from orchestrator.lifecycle.recovery import RecoveryPlan
from orchestrator.lifecycle.states import Job, Order
from planner.ir import Schedule
from planner.plan import Plan
from planner.wording import named
from workers.protocol import Report, Request, StepReport, SwitchReport

Moving = tuple[Job, tuple[Command, ...]]


def begin(order: Order, job: Job, move: Move) -> Moving:
    """Have the ranks follow another plan."""
    if job.intents.asked is not None or job.intents.pausing or job.membership.going:
        return job, (
            _warn("the ranks are about to regroup: the move of layers does not start; ask again afterwards"),
        )
    plans = path(job.progress.plan, move.plan)
    if not plans:
        return job, (_warn("the ranks follow that plan already: nothing moves"),)
    job, void = voided(job, "another one takes its place")
    migration = Migration(move=move, path=plans, began=job.progress.step, now=job.progress.plan)
    job = replace(job, intents=replace(job.intents, migration=migration))
    commands = void
    if move.mode == "deferred" and (held := arrivals(job.progress.plan, move.plan)):
        layers = named("layer", sorted({layer for layer, _ in held}))
        commands = (
            *void,
            _warn(
                f'updates of {layers} are held while they move (elastic.migration = "deferred"): the weights'
                " are no longer those of a run without the move"
            ),
        )
    if move.mode == "stop":
        return replace(job, intents=replace(job.intents, asked="move")), (
            *commands,
            Ask(Request.REGROUP, job.membership.members[0]),
        )
    job, more = _issue(order, job)
    return job, (*commands, *more)


def _issue(order: Order, job: Job) -> Moving:
    """Issue the next plan: log it, then send it."""
    migration = job.intents.migration
    assert migration is not None
    plan = numbered(order, job, migration.path[0], migration.move.plan.reason)
    migration = replace(migration, path=(plan, *migration.path[1:]), reached=frozenset())
    job = replace(
        job,
        intents=replace(job.intents, migration=migration),
        progress=replace(job.progress, version=plan.version),
    )
    held: tuple[tuple[int, int], ...] = ()
    if migration.move.mode == "deferred" and plan.layers == migration.now.layers:
        held = arrivals(migration.now, migration.move.plan)
    same = plan.layers == job.progress.plan.layers and plan.schedule == job.progress.plan.schedule
    schedule = job.progress.schedule if same else migration.move.schedule
    switch = Switch(plan, schedule, held, job.membership.members)
    return job, (Log(events.Issued(plan=plan)), switch)


def numbered(order: Order, job: Job, plan: Plan, reason: str) -> Plan:
    """`plan` as the next one of this controller."""
    return replace(plan, epoch=order.epoch, version=job.progress.version + 1, reason=reason)


def take_report(order: Order, job: Job, report: Report) -> Moving:
    """Apply a rank's report to the move that is under way."""
    migration = job.intents.migration
    if migration is None:
        return (_followed(job, report) if isinstance(report, SwitchReport) else job), ()
    if isinstance(report, SwitchReport):
        return _switched(order, job, migration, report)
    if not isinstance(report, StepReport):
        return job, ()
    if migration.move.mode != "stop" or not migration.told:
        return replace(
            job, intents=replace(job.intents, migration=replace(migration, committed_s=report.committed_s))
        ), ()
    # This is the first step of the generation that formed for the move.
    stall_s = max(0.0, report.committed_s - migration.committed_s - report.step_s)
    end_s = report.committed_s - report.step_s
    ended = _migrated(job.progress.plan.version, replace(migration, stall_s=stall_s), report.step - 1, end_s)
    return replace(job, intents=replace(job.intents, migration=None)), (Log(ended),)


def _followed(job: Job, report: SwitchReport) -> Job:
    """The ranks switch to the plan that the previous controller had issued."""
    if job.progress.prepared is None:
        return job
    plan, schedule = job.progress.prepared
    if (report.epoch, report.version) != (plan.epoch, plan.version):
        return job
    return replace(job, progress=replace(job.progress, plan=plan, schedule=schedule, prepared=None))


def _switched(order: Order, job: Job, migration: Migration, report: SwitchReport) -> Moving:
    plan = migration.path[0]
    if (report.epoch, report.version) != (plan.epoch, plan.version):
        return job, ()
    migration = replace(
        migration,
        reached=migration.reached | {report.rank},
        # Bytes reported before the first plan of the path is in force were brought for other reasons.
        bytes=migration.bytes
        + (0 if migration.told or job.progress.plan is migration.now else report.brought_bytes),
        stall_s=max(migration.stall_s, report.stall_s),
    )
    if len(migration.reached) < len(job.membership.members):
        return replace(job, intents=replace(job.intents, migration=migration)), ()
    same = plan.layers == job.progress.plan.layers and plan.schedule == job.progress.plan.schedule
    schedule = job.progress.schedule if same else migration.move.schedule
    job = replace(job, progress=replace(job.progress, plan=plan, schedule=schedule))
    logs: tuple[Command, ...] = ()
    if not migration.told and plan.layers == migration.move.plan.layers:
        logs = (Log(_migrated(plan.version, migration, report.step, report.switched_s)),)
        migration = replace(migration, told=True)
    left = migration.path[1:]
    if not left:
        return replace(job, intents=replace(job.intents, migration=None)), logs
    job, commands = _issue(
        order, replace(job, intents=replace(job.intents, migration=replace(migration, path=left)))
    )
    return job, (*logs, *commands)


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


def ended(job: Job) -> Moving:
    """The generation is over, and so is the move, unless the generation ended for it."""
    job = replace(job, progress=replace(job.progress, prepared=None))
    if (
        job.intents.migration is not None
        and job.intents.migration.move.mode == "stop"
        and job.intents.asked == "move"
    ):
        return job, ()
    return voided(job, "the generation ended before they had moved")


def instead(order: Order, job: Job, recovery_plan: RecoveryPlan) -> tuple[Job, Plan, Schedule] | None:
    """Return the next generation's plan, if the last generation ended for a move."""
    migration = job.intents.migration
    if migration is None or migration.told or not recovery_plan.keep_plan or recovery_plan.cause != "move":
        return None
    plan = numbered(order, job, migration.move.plan, migration.move.plan.reason)
    job = replace(
        job,
        progress=replace(job.progress, version=plan.version),
        intents=replace(job.intents, migration=replace(migration, told=True)),
    )
    return job, plan, migration.move.schedule


def voided(job: Job, why: str) -> Moving:
    """Cancel what is left of a move; warn if its layers had not moved yet."""
    migration = job.intents.migration
    if migration is None:
        return job, ()
    job = replace(job, intents=replace(job.intents, migration=None))
    if migration.told:
        return job, ()
    layers = named("layer", moved_layers(migration.now, migration.move.plan))
    return job, (_warn(f"the move of {layers} is cancelled: {why}"),)


def _warn(text: str) -> Log:
    return Log(events.Warned(text=text))
