"""Microbatches of each pipeline where gradients are summed microbatch by microbatch (`Plan.shard` = `gradients`).

Pure. There is one order of summation, by microbatch of a replica and then by replica, whoever executes them. So
siblings share them out round by round: in each round every pipeline has the next one, and all come to a place of the
order at the same time.
"""

from __future__ import annotations

from planner.plan import Plan


def order(plan: Plan) -> tuple[int, ...]:
    """The global microbatches of a step in the order in which their gradients are summed."""
    return tuple(
        replica * plan.microbatches + microbatch
        for microbatch in range(plan.microbatches)
        for replica in range(plan.replicas)
    )


def busy_pipelines(plan: Plan) -> tuple[int, ...]:
    """Per window of a step, how many pipelines execute it: the first ones. All execute each but the last."""
    return tuple(
        min(plan.pipeline_count, plan.replicas - window * plan.pipeline_count)
        for window in range(1 if plan.shares else plan.windows)
    )


def executed_by(plan: Plan) -> tuple[int, ...]:
    """Per place of `order`, the pipeline that executes it.

    With uneven shares, pipelines have the first part of their microbatches when the others have that part of theirs.
    """
    if not plan.shares:
        return tuple(
            number % busy for busy in busy_pipelines(plan) for number in range(busy * plan.microbatches)
        )
    taken = [0] * plan.pipeline_count
    found: list[int] = []
    for _ in range(sum(plan.shares)):
        behind = min(
            (pipeline for pipeline, share in enumerate(plan.shares) if taken[pipeline] < share),
            key=lambda pipeline: (taken[pipeline] + 1) / plan.shares[pipeline],
        )
        taken[behind] += 1
        found.append(behind)
    return tuple(found)


def windows_of(plan: Plan, pipeline: int) -> tuple[tuple[int, ...], ...]:
    """The global microbatches of each window that `pipeline` executes in a step: those of a replica each, or with
    uneven shares its share in one."""
    own = [g for g, executes in zip(order(plan), executed_by(plan), strict=True) if executes == pipeline]
    size = len(own) if plan.shares else plan.microbatches
    return tuple(tuple(own[first : first + size]) for first in range(0, len(own), size))
