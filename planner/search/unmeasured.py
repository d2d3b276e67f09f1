"""Plans whose cut needs no profile: by parameter counts, or the user's list."""

from __future__ import annotations

from collections.abc import Sequence

from planner.ir import Schedule
from planner.partition import explicit, parameter
from planner.plan import Plan


def unmeasured_plan(
    schedule: Schedule,
    parameters: Sequence[int],
    *,
    counts: Sequence[int] | None = None,
    replicas: int,
    pipelines: int | None = None,
    shard: str = "none",
    recompute: tuple[int, ...] = (),
    reason: str = "",
) -> Plan:
    """The plan of `schedule`, version 1 of epoch 0, with no standbys.

    Args:
        schedule: without recomputes.
        parameters: per layer.
        counts: layers per stage; None cuts by parameters.
        pipelines: copies of the pipeline that run; None: one per replica.
        shard: as in `Plan`.

    Raises:
        ValueError: more stages than layers, or counts that do not add up to the layers.
    """
    if counts is None:
        layers = parameter.partition(parameters, schedule.stages)
    else:
        layers = explicit.partition(counts, len(parameters), schedule.stages)
    return Plan(
        epoch=0,
        version=1,
        reason=reason,
        layers=layers,
        stage_ranks=tuple(schedule.rank_of_stage[stage] for stage in range(schedule.stages)),
        schedule=schedule.name,
        chunks=max(len(schedule.stages_of_rank(rank)) for rank in range(schedule.ranks)),
        microbatches=schedule.microbatches,
        replicas=replicas,
        pipelines=pipelines,
        shard=shard,
        recompute=recompute,
        partition="parameter" if counts is None else "explicit",
    )
