"""PipeTransformer's AutoPipe and AutoDP: the pipelines of a job whose first layers are frozen, as in its paper.

Algorithm 1 cuts by parameters, and the ranks of a pipeline are halved while the largest of the halved one takes no more
memory than the largest of the first one did (eq. 2): here, as predicted, since by parameters one rank is never reached.
As many pipelines run as there are ranks and replicas for. The search of `search.py` does the same by simulated times.
"""

from __future__ import annotations

from dataclasses import replace

from planner.ir import Schedule
from planner.partition.pipetransformer import compressed, partition
from planner.plan import Plan, PlanError
from planner.profile import Profile
from planner.schedule.expand import schedule_of
from planner.schedule.registry import families
from planner.schedule.validate import ScheduleError
from planner.simulation.predict import predict
from planner.wording import counted


def packed(
    profile: Profile, first: Plan, ranks: int, *, frozen: int, frozen_cost: float
) -> tuple[Plan, Schedule]:
    """The plan for `ranks` ranks, without copies, and its schedule.

    Args:
        profile: with a device for each rank, and with the frozen layers and what memory they release.
        first: the job's first plan, of a family; every plan drops the same frozen layers (`Plan.frozen`).
        frozen: layers frozen from the input up.
        frozen_cost: size of a frozen layer over that of a trained one, lambda.

    Raises:
        PlanError: the job has a user's own table, or its family has no schedule for so few ranks.
    """
    if first.schedule not in families():
        raise PlanError(
            f"{first.schedule} is a table of its own: PipeTransformer's Algorithm 1 takes a schedule by name"
        )
    most = min(first.pipeline_ranks, ranks)
    begun_bytes = first.predicted_peak_memory_bytes or 0
    found: dict[int, tuple[Plan, Schedule]] = {}

    def cut(length: int) -> tuple[Plan, Schedule]:
        if length not in found:
            found[length] = _cut(profile, first, ranks, length, frozen, frozen_cost)
        return found[length]

    def fits(length: int) -> bool:
        try:
            plan, schedule = cut(length)
        except (ScheduleError, ValueError):
            return False
        prediction = predict(profile, plan, schedule)
        return prediction.fits and max(prediction.memory.peak_bytes) <= begun_bytes

    length = compressed(most, fits)
    try:
        return cut(length)
    except (ScheduleError, ValueError) as error:
        raise PlanError(f"no pipeline of {counted(length, 'rank')}: {error}") from error


def _cut(
    profile: Profile, first: Plan, ranks: int, length: int, frozen: int, frozen_cost: float
) -> tuple[Plan, Schedule]:
    """The plan of pipelines of `length` ranks, and its schedule.

    Raises:
        ScheduleError: the family has none.
        ValueError: more stages than layers.
    """
    family = families()[first.schedule]
    family.check(length, first.microbatches, first.chunks)
    sizes = [layer.parameters for layer in profile.model.layers]
    plan = replace(
        first,
        layers=partition(sizes, family.stages(length, first.chunks), frozen=frozen, frozen_cost=frozen_cost),
        stage_ranks=family.placement(length, first.chunks),
        pipelines=min(first.replicas, ranks // length),
        shares=(),
        standbys=(),
        snapshots=(),
        partition="pipetransformer",
    )
    return plan, schedule_of(plan)
