"""Plan -> Schedule: the only place that knows which stages of a cut recompute, and which have no backward pass. Pure:
the caller reads table files."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import lru_cache

from planner.ir import ActionKind, Schedule
from planner.plan import Plan
from planner.schedule.passes import add_recompute, freeze_stages, with_stage_ranks
from planner.schedule.registry import build, families
from planner.schedule.validate import ScheduleError


def schedule_of(plan: Plan, table: Schedule | None = None) -> Schedule:
    """The validated schedule that `plan` names, with its stages on the plan's ranks and its recomputes, and without the
    backward passes of its frozen stages.

    Args:
        table: the user's own table without recomputes, if the plan names one; None builds the plan's family.

    Raises:
        ScheduleError: no such family, or sizes or a placement that it does not allow.
    """
    base = table or build(plan.schedule, plan.pipeline_ranks, plan.microbatches, plan.chunks)
    base = with_stage_ranks(base, plan.stage_ranks)
    base = freeze_stages(base, frozen_stages(plan.schedule, plan.layers, plan.frozen))
    return with_recompute(base, recomputing_stages(plan.layers, plan.recompute))


def schedule_after(running: Schedule, plan: Plan) -> Schedule:
    """The validated schedule that `plan` names, for a job that runs `running`.

    A plan that names no family keeps the user's table as the job started with it, whatever became of the file.

    Raises:
        ScheduleError: as `schedule_of`.
    """
    known = plan.schedule == running.name and (
        running.ranks,
        running.stages,
        running.microbatches,
        running.frozen_stages,  # what these lack, no pass brings back
    ) == (plan.pipeline_ranks, plan.stages, plan.microbatches, 0)
    if plan.schedule in families() and not known:
        return schedule_of(plan)
    return schedule_of(plan, without_recompute(running))


def schedule_of_pipeline(plan: Plan, schedule: Schedule, pipeline: int) -> Schedule:
    """The schedule that `pipeline` runs: `schedule`, which is the plan's for one replica, or with uneven shares the
    plan's family for as many microbatches as the pipeline's share.

    Raises:
        ScheduleError: the family has no schedule for so many; a table of the user's own has none for other numbers.
    """
    if not plan.shares:
        return schedule
    if plan.schedule not in families():
        raise ScheduleError(
            f"{plan.schedule} is a table for {schedule.microbatches} microbatches: its pipelines cannot have the"
            f" shares {list(plan.shares)}"
        )
    frozen = frozen_stages(plan.schedule, plan.layers, plan.frozen)
    again = recomputing_stages(plan.layers, plan.recompute)
    return _built(plan.schedule, plan.stage_ranks, plan.shares[pipeline], plan.chunks, frozen, again)


def pipeline_schedules(plan: Plan, schedule: Schedule) -> tuple[Schedule, ...]:
    """`schedule_of_pipeline` of each pipeline; without shares, one for all.

    Raises:
        ScheduleError: as `schedule_of_pipeline`.
    """
    if not plan.shares:
        return (schedule,)
    return tuple(schedule_of_pipeline(plan, schedule, pipeline) for pipeline in range(plan.pipeline_count))


@lru_cache(maxsize=256)  # a search asks for the same few again and again
def _built(
    name: str,
    stage_ranks: tuple[int, ...],
    microbatches: int,
    chunks: int,
    frozen: int,
    recompute: frozenset[int],
) -> Schedule:
    placed = with_stage_ranks(build(name, max(stage_ranks) + 1, microbatches, chunks), stage_ranks)
    return with_recompute(freeze_stages(placed, frozen), recompute)


def with_recompute(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """`schedule` with an R on each of `stages`; `schedule` itself if `stages` is empty."""
    return add_recompute(schedule, stages) if stages else schedule


def without_recompute(schedule: Schedule) -> Schedule:
    """`schedule` without its R actions: what `with_recompute` was given; `schedule` itself if it has none."""
    if all(action.kind is not ActionKind.RECOMPUTE for program in schedule.programs for action in program):
        return schedule
    kept = [
        tuple(action for action in program if action.kind is not ActionKind.RECOMPUTE)
        for program in schedule.programs
    ]
    return replace(schedule, programs=tuple(kept))


def frozen_stages(schedule: str, layers: Sequence[tuple[int, int]], frozen: int) -> int:
    """Number of stages, the first ones, that hold none but the first `frozen` layers and so need no backward pass;
    `layers`: [first, stop) per stage.

    A table of the user's own keeps all of its backward passes: nobody could bring them back for another step.
    """
    return sum(stop <= frozen for _, stop in layers) if schedule in families() else 0


def recomputing_stages(layers: Sequence[tuple[int, int]], recompute: Collection[int]) -> frozenset[int]:
    """The stages that hold a layer of `recompute`; `layers`: [first, stop) per stage."""
    return frozenset(
        stage
        for stage, (first, stop) in enumerate(layers)
        if any(first <= layer < stop for layer in recompute)
    )
