"""Other cuts of a running pipeline: the same ranks, schedule and standbys, other layers per stage. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.partition import explicit
from planner.plan import Plan, PlanError
from planner.schedule.expand import schedule_after, without_recompute
from planner.schedule.registry import families
from planner.search.alternatives import Alternative
from planner.search.evaluate import Evaluator
from planner.search.replan import Replanner
from planner.search.search import END_TO_END, QUICK, choose_among
from planner.search.shapes import PipelineShape, shape_of
from planner.search.unmeasured import unmeasured_plan
from planner.simulation.predict import Prediction, predict


def with_counts(now: Plan, counts: Sequence[int]) -> Plan:
    """`now` with `counts` layers in its stages.

    Raises:
        PlanError: not one count per stage, a stage with no layer, or other layers than the model's.
    """
    try:
        layers = explicit.partition(counts, now.layers[-1][1], now.stages)
    except ValueError as error:
        raise PlanError(str(error)) from error
    return replace(now, layers=layers, partition="explicit")


def best(
    replanner: Replanner,
    now: Plan,
    domains: Sequence[str],
    slowdowns: Sequence[float | None] | None = None,
) -> tuple[Plan, tuple[Alternative, ...]]:
    """`now` with the fastest cut that the planner finds, and the cuts that it compared.

    Without a profile the cut is by parameters, and nothing was compared.

    Raises:
        PlanError: no cut fits the memory; says by how much.
    """
    running = without_recompute(schedule_after(replanner.schedule, replace(now, frozen=0)))
    if replanner.profile is None:
        cut = unmeasured_plan(running, replanner.parameters, replicas=now.replicas)
        return replace(now, layers=cut.layers, partition=cut.partition), ()
    shape = shape_of(running)
    if now.schedule in families():
        shape = PipelineShape(
            name=now.schedule, ranks=now.pipeline_ranks, chunks=now.chunks, microbatches=now.microbatches
        )
    evaluator = Evaluator(
        replanner.profile_on(domains, slowdowns),
        shape,
        replicas=now.replicas,
        recompute=now.recompute,
        frozen=now.frozen,
        pipelines=now.pipelines,
        shard=now.shard,
        domains=domains if replanner.copies else None,
        copies=replanner.copies,
        copy_every=replanner.copy_every,
    )
    choice = choose_among((evaluator,), END_TO_END, effort=QUICK)
    return replace(now, layers=choice.plan.layers, partition=END_TO_END), choice.alternatives


def predicted(
    replanner: Replanner,
    plan: Plan,
    domains: Sequence[str],
    slowdowns: Sequence[float | None] | None = None,
) -> Prediction | None:
    """The prediction of one step of `plan`, whether or not it fits the memory; None without a profile."""
    if replanner.profile is None:
        return None
    profile = replanner.profile_on(domains, slowdowns)
    return predict(profile, plan, schedule_after(replanner.schedule, plan))
