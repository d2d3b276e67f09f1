"""Restores the job from the view of its log for a controller that takes over. Pure."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.history.job_view import JobView
from orchestrator.history.ranks_view import KEPT_CHECKPOINTS
from orchestrator.lifecycle.reports import with_freeze
from orchestrator.lifecycle.scaling import size_asked
from orchestrator.lifecycle.states import Intents, JobData, Membership, Order, Progress
from planner.schedule.expand import schedule_after
from workers.protocol.orders import CheckpointRef


def taken_over(order: Order, view: JobView) -> Order:
    """Return the order of the controller that takes over.

    Args:
        order: as the job was submitted.
        view: of the whole log, earlier starts included.
    """
    ranks, plan = view.ranks, view.followed or order.plan
    trained = ranks.generation is not None
    # A plan issued since the generation formed belongs to a move: no generation forms for it.
    moving = trained and view.plan is not None and view.plan not in (view.formed, plan)
    generation = ranks.generation if ranks.generation is not None else order.generation - 1
    job = JobData(
        progress=Progress(
            plan=plan,
            schedule=schedule_after(order.schedule, plan),
            generation=generation,
            trained=trained,
            step=view.step if trained else start_of(order),
            since=ranks.since or 0,
            began=ranks.began,
            validated=view.validated,
            prefix_told=max(view.freeze.prefixes, default=0),
            frozen=0 if view.freeze.prefix is None else view.freeze.prefix.layers,
            checkpoints=tuple(_checkpoints(order, view)),
            freeze=with_freeze(order.freezing.plans, view.freeze.plans.values()),
            failures=ranks.failures,
            failed_at=ranks.failed_at,
            halted=view.state == "paused",
            prepared=(
                (view.plan, schedule_after(order.schedule, view.plan))
                if moving and view.plan is not None
                else None
            ),
        ),
        membership=Membership(
            members=ranks.members,
            # Without members the job is paused or about to resume: ranks started for that are started again.
            alive=frozenset(ranks.alive) if ranks.members else frozenset(),
            going=frozenset(ranks.going & ranks.alive),
            nodes=dict(ranks.nodes),
            hosts=dict(ranks.hosts),
            zones=dict(ranks.zones),
            next_rank=ranks.next_rank,
            size=size_asked(ranks.scaled) if ranks.scaled else None,
        ),
        intents=Intents(proposed=view.freeze.proposed, stopping=view.stopping, halting=view.pausing),
    )
    first = replace(order.plan, epoch=max(view.epoch, order.epoch) + 1)
    return replace(
        order,
        epoch=first.epoch,
        plan=first,
        generation=generation + 1,
        earlier=job,
        # Measurements and decisions of the previous controller stay valid, as after a resume.
        freezing=order.freezing if order.freezing.replayed else view.freeze_history(),
    )


def start_of(order: Order) -> int:
    """The step that the job starts from."""
    return order.checkpoints[0].step if order.checkpoints else 0


def _checkpoints(order: Order, view: JobView) -> list[CheckpointRef]:
    """Return checkpoints, newest first: those the job started from and those it wrote, no damaged ones."""
    written = {ref.path for ref in view.ranks.checkpoints}
    given = [ref for ref in order.checkpoints if ref.path not in {*written, *view.ranks.damaged}]
    known = sorted((*view.ranks.checkpoints, *given), key=lambda ref: ref.step, reverse=True)
    return known[: max(KEPT_CHECKPOINTS, len(given))]
