"""Resolves a settled spec into the ranks' inputs: the first plan, its schedule, their configuration. Pure.

Plans that need a measurement or a search are made in `planning.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from orchestrator.prepare.model_outline import ModelOutline
from orchestrator.prepare.settling import SettledSpec
from orchestrator.spec.checks import AUTO, settle_elastic
from orchestrator.spec.job_spec import Spec
from planner.ir import Schedule
from planner.plan import Plan, recomputable
from planner.schedule.expand import schedule_of
from planner.schedule.table_format import CSV_PREFIX
from planner.search import unmeasured
from planner.search.standbys import protected
from planner.wording import counted
from workers.config import AdaptConfig, ElasticConfig, EmulatedConfig, WorkerConfig
from workers.protocol import JobError


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """All inputs of a job."""

    spec: Spec
    """The spec with nothing left to choose."""
    config: WorkerConfig
    plan: Plan
    schedule: Schedule
    outline: ModelOutline

    @property
    def per_rank(self) -> Mapping[str, float]:
        """Resources that each rank reserves."""
        resources = self.spec.cluster.resources_per_rank
        assert resources is not None
        return resources


def resolve(settled: SettledSpec, *, epoch: int, plan: Plan | None = None) -> Resolved:
    """Resolve a settled spec.

    Args:
        epoch: incarnation of the controller.
        plan: the first plan; None: the one that the spec gives without a profile.

    Raises:
        JobError: the model cannot be cut as asked.
    """
    spec, found = settled.spec, settled.outline
    plan = replace(plan or unmeasured_plan(settled), epoch=epoch, version=1)
    counts = plan.layers_per_stage
    pipeline = spec.pipeline.model_copy(
        update={
            "ranks": plan.world_size,
            "schedule": plan.schedule,
            "chunks": plan.chunks,
            "microbatches": plan.microbatches,
            "partition": counts,
        }
    )
    # A search may have chosen the number of ranks.
    elastic = elastic_of(spec.elastic, plan)
    plan = _protected(plan, elastic, found)
    adapt = _settled_adapt(spec.adapt, plan.replicas * plan.microbatches * pipeline.microbatch_size, found)
    spec = spec.model_copy(update={"pipeline": pipeline, "elastic": elastic, "adapt": adapt})
    table = settled.schedule if plan.schedule.startswith(CSV_PREFIX) else None
    schedule = schedule_of(plan, table)
    config = worker_config(spec, language=found.language, emulated=found.emulated)
    return Resolved(spec=spec, config=config, plan=plan, schedule=schedule, outline=found)


def worker_config(spec: Spec, *, language: bool, emulated: EmulatedConfig) -> WorkerConfig:
    """The part of the resolved `spec` that ranks need.

    Args:
        language: whether the model is one of language, of which text can be sampled.
        emulated: the times of emulated devices, with nothing left to read.
    """
    device, pipeline = spec.cluster.device, spec.pipeline
    assert device != AUTO
    assert pipeline.microbatches != AUTO
    return WorkerConfig(
        job=spec.job.name,
        seed=spec.job.seed,
        steps=spec.job.steps,
        precision=spec.job.precision,
        threads=spec.job.threads,
        compile=spec.job.compile,
        validate_every=spec.job.validate_every,
        timeline_every=spec.job.timeline_every,
        curvature_every=spec.job.curvature_every,
        sample_tokens=spec.job.sample_tokens if language else 0,
        output=spec.job.folder,
        device=device,
        pin_cores=spec.cluster.pin_cores,
        microbatch_size=pipeline.microbatch_size,
        microbatches=pipeline.microbatches,
        replicas=pipeline.replicas,
        model=spec.model,
        data=spec.data,
        optimizer=spec.optimizer,
        checkpoint=spec.checkpoint,
        emulated=emulated,
        freeze=spec.freeze,
        adapt=spec.adapt,
        elastic=spec.elastic,
    )


def _settled_adapt(adapt: AdaptConfig, step_samples: int, found: ModelOutline) -> AdaptConfig:
    """`adapt` with the steps of an epoch."""
    if adapt.policy != "epoch" or adapt.epoch_steps is not None:
        return adapt
    return adapt.model_copy(update={"epoch_steps": max(1, found.train_samples // step_samples)})


def elastic_of(elastic: ElasticConfig, plan: Plan) -> ElasticConfig:
    """`elastic` settled for the ranks of `plan`; what `auto` has chosen, its copies say.

    Raises:
        JobError: as for `settle_elastic`.
    """
    elastic = settle_elastic(elastic, plan.world_size)
    if elastic.redundancy != AUTO:
        return elastic
    if not plan.standbys and not plan.snapshots:
        return elastic.model_copy(update={"redundancy": "checkpoint"})
    return elastic.model_copy(update={"redundancy": "peer", "copy_every": plan.snapshot_every or 1})


def _protected(plan: Plan, elastic: ElasticConfig, found: ModelOutline) -> Plan:
    """`plan` with its copies; if it lacks them, placed as if each place were on a node of its own."""
    if elastic.redundancy == "peer" and (plan.standbys or plan.snapshots):
        return plan
    nodes = tuple(f"node {place}" for place in range(plan.world_size))
    return protected(plan, nodes, found.parameters, elastic.peer_copies, elastic.copy_every)


def unmeasured_plan(settled: SettledSpec) -> Plan:
    """Plan for given ranks, schedule and microbatches, with a cut that needs no profile.

    Raises:
        JobError: the model cannot be cut as asked.
    """
    spec, found, schedule = settled.spec, settled.outline, settled.schedule
    assert schedule is not None, "a search settles the schedule: it makes the plan too"
    pipeline = spec.pipeline
    check_stages(spec, schedule, found)
    counts = None if isinstance(pipeline.partition, str) else pipeline.partition
    how = "balanced by parameter count" if counts is None else "as the spec asks"
    recompute = recomputed_layers(spec, len(found.layers))
    try:
        return unmeasured.unmeasured_plan(
            schedule,
            found.parameters,
            counts=counts,
            replicas=pipeline.replicas,
            shard=pipeline.shard,
            recompute=recompute,
            reason=f"first plan: {counted(len(found.layers), 'layer')} cut {how}",
        )
    except ValueError as error:
        raise JobError(f"pipeline.{error}") from error


def recomputed_layers(spec: Spec, layers: int) -> tuple[int, ...]:
    """The layers that `spec` recomputes, of a model with `layers` layers.

    Raises:
        JobError: the spec names a layer that the model does not have.
    """
    wanted = spec.pipeline.recompute
    if isinstance(wanted, bool):
        return recomputable(layers) if wanted else ()
    beyond = [layer for layer in wanted if layer >= layers]
    if beyond:
        raise JobError(
            f"pipeline.recompute names layer {beyond[0]}, but the model has layers 0 to {layers - 1}"
        )
    return tuple(sorted(set(wanted)))


def check_stages(spec: Spec, schedule: Schedule, found: ModelOutline) -> None:
    """Raises:
    JobError: more stages than the model has layers.
    """
    layers, stages = len(found.layers), schedule.stages
    if stages > layers:
        per_rank = stages // schedule.ranks
        each = f" x {per_rank} stages each" if per_rank > 1 else ""
        raise JobError(
            f"pipeline.ranks = {spec.pipeline.ranks} is more than the model can fill: {counted(schedule.ranks, 'rank')}"
            f" per pipeline{each} are {counted(stages, 'stage')}, and the model has {counted(layers, 'layer')}"
            f" ({', '.join(found.layers)}). Use at most"
            f" {counted(layers // per_rank * spec.pipeline.replicas, 'rank')},"
            " or more layers"
        )
