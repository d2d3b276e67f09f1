"""Checks requests for a move of layers against the current job. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.lifecycle.migration import Mode, RequestedMove, moved_layers, path
from orchestrator.lifecycle.moves import expected
from orchestrator.lifecycle.states import JobData
from planner.plan import Plan, PlanError
from planner.search.layer_move import with_layers
from planner.search.replan import Replanner
from planner.wording import counted, shares_text
from workers.protocol.errors import JobError


def move_of_layers(
    job: JobData,
    replanner: Replanner,
    layers: tuple[int, int],
    rank: int,
    *,
    mode: Mode,
    asked_s: float,
    slowdowns: Sequence[float | None] | None = None,
) -> RequestedMove:
    """Return the move of the layers [first, stop) to `rank`.

    Raises:
        JobError: there is no such layer or rank, they are not adjacent, or they do not fit its memory.
    """
    if rank not in job.membership.members:
        there = ", ".join(str(one) for one in sorted(job.membership.members))
        raise JobError(f"rank {rank} has no place in the pipeline; ranks with a place: {there}")
    now = expected(job)[0]
    place = now.place(job.membership.members.index(rank)).rank
    try:
        plan = with_layers(now, *layers, place)
        moved = moved_layers(now, plan)
        listed = ", ".join(map(str, moved))
        what = f"layer {listed} moves" if len(moved) == 1 else f"layers {listed} move"
        plan = replace(plan, reason=f"{what} to rank {rank}, as asked")
        return move_to(job, replanner, plan, mode=mode, asked_s=asked_s, slowdowns=slowdowns)
    except PlanError as error:
        raise JobError(f"cannot move to rank {rank}: {error}") from error


def move_to(
    job: JobData,
    replanner: Replanner,
    plan: Plan,
    *,
    mode: Mode,
    asked_s: float,
    slowdowns: Sequence[float | None] | None = None,
) -> RequestedMove:
    """Return the move to `plan`, for the same ranks in the same places, once the moves requested before are over.

    Args:
        slowdowns: by place, as far as they are known.

    Raises:
        PlanError: it does not fit the memory.
    """
    now, domains = expected(job)[0], domains_of(job)
    checked, schedule = replanner.checked(plan, domains, slowdowns)
    for between in path(now, checked):
        replanner.check_memory(between, domains, now, checked)
    return RequestedMove(plan=checked, schedule=schedule, mode=mode, asked_s=asked_s, base=now)


def domains_of(job: JobData) -> list[str]:
    """Return per place the failure domain of its rank."""
    return [*map(job.membership.domain, job.membership.members)]


def described(job: JobData, move: RequestedMove) -> str:
    """Describe the move in words."""
    now = expected(job)[0]
    layers, plans = moved_layers(now, move.plan), path(now, move.plan)
    told = f"{counted(len(layers), 'layer')} ({', '.join(map(str, layers))}) to move, {move.mode}"
    if not layers and now.shares != move.plan.shares:
        told = f"a step with {shares_text(move.plan.shares)}, {move.mode}"
    if job.intents.migration is not None:
        return f"{told}: once the move before it is over"
    if move.mode == "stop":
        return f"{told}: at the next commit the ranks regroup"
    if not layers:
        return f"{told}: from a commit on, and nothing is sent"
    if plans and plans[0].same_work_as(move.plan):
        return f"{told}: a copy is there already, and takes over at a commit"
    return f"{told}: copied while training goes on, then taken over at a commit"
