"""A move of layers from the request to its end, within one generation. A part of the lifecycle, and pure.

The plans on the way are issued one by one, each once every rank has reported that it follows the one before.
The end of the generation cancels the rest. A move that is requested meanwhile begins once this one is over, its last
copies included: until then the ranks may hold other layers than the newest plan that all of them follow.
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.events import types as events
from orchestrator.lifecycle.answers import answer
from orchestrator.lifecycle.effects import AppendToLog, Ask, Effect, Switch
from orchestrator.lifecycle.migration import Migration, RequestedMove, moved_layers, path, same
from orchestrator.lifecycle.recovery import RecoveryPlan
from orchestrator.lifecycle.states import JobData, Order
from planner.arrivals import Arrivals, arrivals
from planner.ir import Schedule
from planner.plan import Plan
from planner.wording import named
from workers.protocol.orders import Request
from workers.protocol.reports import Report, StepReport, SwitchReport

Moving = tuple[JobData, tuple[Effect, ...]]


def expected(job: JobData) -> tuple[Plan, Schedule]:
    """Return the plan that the ranks follow once all requested moves are over, and its schedule."""
    coming = [job.intents.migration.move] if job.intents.migration is not None else []
    coming += job.intents.moves
    return (coming[-1].plan, coming[-1].schedule) if coming else (job.progress.plan, job.progress.schedule)


def newest_version(job: JobData) -> tuple[int, int]:
    """Return epoch and version of the newest plan that was issued."""
    migration, plan = job.intents.migration, job.progress.plan
    if migration is not None and migration.move.mode != "stop":
        plan = migration.path[0]
    return plan.key


def request(order: Order, job: JobData, move: RequestedMove) -> Moving:
    """Have the ranks follow another plan, once no other move is under way."""
    if move.base is not None and not same(expected(job)[0], move.base):
        return job, refused(job, move, "the job's plan has changed meanwhile: nothing moves; ask again")
    if job.intents.migration is not None:
        return replace(job, intents=replace(job.intents, moves=(*job.intents.moves, move))), ()
    return _begin(order, job, move)


def _begin(order: Order, job: JobData, move: RequestedMove) -> Moving:
    if _regroups_soon(job):
        why = "the ranks are about to regroup: the move of layers does not start; ask again afterwards"
        return job, refused(job, move, why)
    plans = path(job.progress.plan, move.plan)
    if not plans:
        nothing = "the ranks follow that plan already: nothing moves"
        return job, (_warn(nothing), *_answers(job, move, True, nothing))
    migration = Migration(move=move, path=plans, began=job.progress.step, now=job.progress.plan)
    job = replace(job, intents=replace(job.intents, migration=migration))
    effects: tuple[Effect, ...] = ()
    if move.mode == "deferred" and (held := arrivals(job.progress.plan, move.plan)):
        layers = named("layer", sorted({piece.layer for piece, _ in held}))
        effects = (
            _warn(
                f'updates of {layers} are held while they move (elastic.migration = "deferred"): the weights'
                " are no longer those of a run without the move"
            ),
        )
    if move.mode == "stop":
        return replace(job, intents=replace(job.intents, asked="move")), (
            *effects,
            Ask(Request.REGROUP, job.membership.members[0]),
        )
    job, more = _issue(order, job)
    return job, (*effects, *more)


def _regroups_soon(job: JobData) -> bool:
    intents = job.intents
    soon = intents.asked is not None or intents.change is not None or intents.pausing or intents.stopping
    return soon or bool(job.membership.going)


def _issue(order: Order, job: JobData) -> Moving:
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
    held: Arrivals = ()
    if migration.move.mode == "deferred" and plan.same_work_as(migration.now):
        held = arrivals(migration.now, migration.move.plan)
    same = plan.same_work_as(job.progress.plan) and plan.schedule == job.progress.plan.schedule
    schedule = job.progress.schedule if same else migration.move.schedule
    switch = Switch(plan, schedule, held, job.membership.members, job.progress.generation)
    return job, (AppendToLog(events.Issued(plan=plan)), switch)


def numbered(order: Order, job: JobData, plan: Plan, reason: str) -> Plan:
    """`plan` as the next one of this controller."""
    return replace(plan, epoch=order.epoch, version=job.progress.version + 1, reason=reason)


def take_report(order: Order, job: JobData, report: Report) -> Moving:
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
    told = _answers(job, migration.move, True, "moved")
    job, more = _next(order, replace(job, intents=replace(job.intents, migration=None)))
    return job, (*told, AppendToLog(ended), *more)


def _next(order: Order, job: JobData) -> Moving:
    """A move is over: begin those that waited for it, as long as they change nothing."""
    effects: list[Effect] = []
    while job.intents.migration is None and job.intents.moves:
        move, *rest = job.intents.moves
        job, more = _begin(order, replace(job, intents=replace(job.intents, moves=tuple(rest))), move)
        effects += more
    return job, tuple(effects)


def _followed(job: JobData, report: SwitchReport) -> JobData:
    """The ranks switch to the plan that the previous controller had issued."""
    if job.progress.prepared is None:
        return job
    plan, schedule = job.progress.prepared
    if (report.epoch, report.version) != plan.key:
        return job
    return replace(job, progress=replace(job.progress, plan=plan, schedule=schedule, prepared=None))


def _switched(order: Order, job: JobData, migration: Migration, report: SwitchReport) -> Moving:
    plan = migration.path[0]
    if (report.epoch, report.version) != plan.key:
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
    same = plan.same_work_as(job.progress.plan) and plan.schedule == job.progress.plan.schedule
    schedule = job.progress.schedule if same else migration.move.schedule
    job = replace(job, progress=replace(job.progress, plan=plan, schedule=schedule))
    logs: tuple[Effect, ...] = ()
    if not migration.told and plan.same_work_as(migration.move.plan):
        moved = AppendToLog(_migrated(plan.version, migration, report.step, report.switched_s))
        logs = (*_answers(job, migration.move, True, "moved"), moved)
        migration = replace(migration, told=True)
    left = migration.path[1:]
    if not left:
        job, more = _next(order, replace(job, intents=replace(job.intents, migration=None)))
        return job, (*logs, *more)
    job, effects = _issue(
        order, replace(job, intents=replace(job.intents, migration=replace(migration, path=left)))
    )
    return job, (*logs, *effects)


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
        shares=then.shares,
    )


def ended(job: JobData) -> Moving:
    """The generation is over, and so is the move, unless the generation ended for it."""
    job = replace(job, progress=replace(job.progress, prepared=None))
    if (
        job.intents.migration is not None
        and job.intents.migration.move.mode == "stop"
        and job.intents.asked == "move"
    ):
        return job, ()
    return voided(job, "the generation ended before they had moved")


def instead(order: Order, job: JobData, recovery_plan: RecoveryPlan) -> tuple[JobData, Plan, Schedule] | None:
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


def voided(job: JobData, why: str) -> Moving:
    """Cancel what is left of the move under way and all that wait; warn of those whose layers had not moved yet."""
    migration, waiting = job.intents.migration, job.intents.moves
    if migration is None:
        return job, ()
    cancelled = [(moved_layers(migration.now, migration.move.plan), migration.move)]
    before = migration.move.plan
    for move in waiting:
        cancelled.append((moved_layers(before, move.plan), move))
        before = move.plan
    done: tuple[Effect, ...] = ()
    if _has_moved(job, migration):
        del cancelled[0]
        if migration.move.mode == "stop":
            done = _answers(job, migration.move, True, "moved")
    before = _without_copies(job.progress.plan, migration) or job.intents.ahead.before
    ahead = replace(job.intents.ahead, before=before)
    job = replace(job, intents=replace(job.intents, migration=None, moves=(), ahead=ahead))
    effects: list[Effect] = [*done]
    for layers, move in cancelled:
        what = f"the move of {named('layer', layers)}" if layers else "the change of shares"
        text = f"{what} is cancelled: {why}"
        effects += refused(job, move, text)
    return job, tuple(effects)


def _without_copies(plan: Plan, migration: Migration) -> Plan | None:
    """The plan that replaces `plan`, if `plan` gives ranks copies for the move alone."""
    instead = next((end for end in (migration.now, migration.move.plan) if plan.same_work_as(end)), None)
    return None if instead is None or same(plan, instead) else instead


def _has_moved(job: JobData, migration: Migration) -> bool:
    """Whether the ranks train with the layers where the move brings them."""
    if migration.move.mode != "stop":
        return migration.told
    return migration.told and job.progress.plan.same_work_as(migration.move.plan)


def refused(job: JobData | None, move: RequestedMove, why: str) -> tuple[Effect, ...]:
    """Warn that `move` does not happen, and answer its command."""
    return (_warn(why), *_answers(job, move, False, why))


def _answers(job: JobData | None, move: RequestedMove, done: bool, text: str) -> tuple[Effect, ...]:
    return (answer(job, move.id, done, text),) if move.id else ()


def _warn(text: str) -> AppendToLog:
    return AppendToLog(events.Warned(text=text))
