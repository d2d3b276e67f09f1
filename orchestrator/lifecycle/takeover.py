"""What a controller that is started again finds of the job in its event log. Pure: records in, values out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from orchestrator.events.types import (
    Failed,
    Finished,
    Formed,
    FreezeSolved,
    Issued,
    Noticed,
    RankFailed,
    RankStarted,
    Record,
    Regrouped,
    Requested,
    Skipped,
    Submitted,
)
from orchestrator.history.freeze_history import began_at, freeze_history_of
from orchestrator.lifecycle.reports import heard
from orchestrator.lifecycle.states import Order, Roster
from planner.ir import Schedule
from planner.plan import Plan
from workers.protocol import (
    CheckpointReport,
    FreezeStarted,
    Request,
    StepReport,
    SwitchReport,
    ValidationReport,
)


def since_start(records: Sequence[Record]) -> tuple[Record, ...]:
    """Those of the newest start of the job, earlier controllers of it included."""
    starts = [
        index
        for index, record in enumerate(records)
        if isinstance(record.event, Submitted) and not record.event.takeover
    ]
    return tuple(records[starts[-1] :]) if starts else ()


def over(records: Sequence[Record]) -> bool:
    """Whether the job has ended."""
    return any(isinstance(record.event, Finished | Failed) for record in records)


def taken_over(order: Order, log: Sequence[Record], expand: Callable[[Plan], Schedule]) -> Order:
    """The order of the controller that goes on.

    Args:
        order: as the job was submitted.
        log: all that is known of the job, earlier runs included, oldest first.
        expand: the schedule of a plan.
    """
    records = since_start(log)
    epochs = [record.event.epoch for record in records if isinstance(record.event, Submitted)]
    roster = Roster(
        plan=order.plan,
        schedule=order.schedule,
        generation=order.generation - 1,
        step=order.checkpoints[0].step if order.checkpoints else 0,
        checkpoints=order.checkpoints,
        freeze=order.freezing.plans,
    )
    issued, formed = order.plan, order.plan
    plans = {(issued.epoch, issued.version): issued}
    for event in (record.event for record in records):
        match event:
            case Issued(plan=plan):
                issued = plans[plan.epoch, plan.version] = plan
            case Formed(generation=generation):
                step = began_at(event)
                void = event.start is not None or step == 0
                formed = issued
                roster = replace(
                    roster,
                    plan=issued,
                    members=generation.members,
                    generation=generation.number,
                    trained=True,
                    step=min(roster.step, step),
                    began=step,
                    since=generation.number if void else roster.since,
                    validated=min(roster.validated, step),
                )
            case RankStarted(rank=rank, node=node, host=host):
                roster = replace(
                    roster,
                    alive=roster.alive | {rank},
                    nodes={**roster.nodes, rank: node},
                    hosts={**roster.hosts, rank: host},
                    next_rank=max(roster.next_rank, rank + 1),
                )
            case RankFailed(rank=rank):
                # One that only raised is found alive; then it is asked, like all others.
                roster = replace(roster, next_rank=max(roster.next_rank, rank + 1))
            case SwitchReport(epoch=epoch, version=version) if (epoch, version) in plans:
                roster = replace(roster, plan=plans[epoch, version])
            case Regrouped(lost=lost):
                roster = replace(roster, alive=roster.alive - frozenset(lost))
            case Noticed(ranks=ranks):
                roster = replace(roster, going=roster.going | frozenset(ranks))
            case Requested(request=Request.STOP):
                roster = replace(roster, stopping=True)
            case StepReport(step=step):
                # What is logged was told of in its order, or after a hole for which nobody is left to tell.
                roster = replace(roster, step=max(roster.step, step))
            case Skipped(damage=damage):
                whole = tuple(ref for ref in roster.checkpoints if ref.path != damage.path)
                roster = replace(roster, checkpoints=whole)
            case ValidationReport() | CheckpointReport() | FreezeStarted():
                roster, _ = heard(roster, event)
            case FreezeSolved(plan=plan):
                roster = replace(roster, proposed=plan)
            case _:
                pass
    # What was issued since is a move's: no generation forms for it.
    moving = roster.trained and issued not in (formed, roster.plan)
    roster = replace(
        roster,
        going=roster.going & roster.alive,
        schedule=expand(roster.plan),
        prepared=(issued, expand(issued)) if moving else None,
    )
    first = replace(order.plan, epoch=max(epochs, default=order.epoch) + 1)
    return replace(
        order,
        epoch=first.epoch,
        plan=first,
        generation=roster.generation + 1,
        roster=roster,
        # What was measured and decided meanwhile stands, as after a resume.
        freezing=order.freezing if order.freezing.replayed else freeze_history_of(log),
    )
