"""From a spec to what the ranks are told: every `auto` settled, the first plan, its schedule. Pure.

What has to be measured or searched comes in as a plan; see `planning.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from orchestrator.prepare.model_outline import ModelOutline
from orchestrator.spec.checks import AUTO, CSV_PREFIX, base_schedule, settle_elastic
from orchestrator.spec.freeze_phases import settle_phases
from orchestrator.spec.job_spec import ClusterConfig, PipelineConfig, Spec
from planner.ir import Schedule
from planner.plan import Plan, recomputable
from planner.schedule.expand import schedule_of
from planner.search import unmeasured
from planner.search.standbys import assign
from workers.config import ElasticConfig, WorkerConfig
from workers.protocol import JobError

EMULATED_CPU = 0.05
"""What an emulated rank reserves of a CPU: it mostly sleeps."""


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """Everything a job is told."""

    spec: Spec
    """With nothing left to choose."""
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

    @property
    def counts(self) -> tuple[int, ...]:
        """Layers per stage."""
        return tuple(stop - first for first, stop in self.plan.layers)


def settle(spec: Spec, found: ModelOutline, cluster_resources: Mapping[str, float]) -> Spec:
    """`spec` with all settled that needs no plan: device, resources, the phases of freezing, a table's numbers, the
    redundancy of a given number of ranks.

    Args:
        spec: with absolute paths.
        cluster_resources: totals of the cluster, for `cluster.device = "auto"`.

    Raises:
        JobError: the phases of freezing do not fit the job, or there is nothing to freeze.
    """
    pipeline = _settle_table(spec.pipeline)
    least = pipeline.replicas if pipeline.ranks == AUTO else pipeline.ranks
    cluster = _settle_cluster(spec.cluster, least, cluster_resources)
    if spec.freeze.timely and cluster.device == "emulated" and not any(_times(found.emulated.weight_grad_s)):
        raise JobError(
            f"freeze.method = {spec.freeze.method!r}, but cluster.emulated.weight_grad_s is 0: there are no weight"
            ' gradients to skip; give them a time, or set freeze.method = "none"'
        )
    return spec.model_copy(
        update={
            "model": spec.model.model_copy(
                update={
                    "vocabulary": spec.model.vocabulary or found.vocabulary,
                    "weights_sha256": found.weights_sha256,
                }
            ),
            "pipeline": pipeline,
            "freeze": settle_phases(spec.freeze, spec.optimizer, spec.job.steps),
            "elastic": spec.elastic
            if pipeline.ranks == AUTO
            else settle_elastic(spec.elastic, pipeline.ranks),
            "cluster": cluster.model_copy(update={"emulated": found.emulated}),
        }
    )


def resolve(
    spec: Spec,
    found: ModelOutline,
    cluster_resources: Mapping[str, float],
    *,
    epoch: int,
    plan: Plan | None = None,
) -> Resolved:
    """What the job is told.

    Args:
        spec: with absolute paths.
        cluster_resources: totals of the cluster, for `cluster.device = "auto"`.
        epoch: incarnation of the controller.
        plan: the plan to begin with; none: the one that the spec gives without a profile.

    Raises:
        JobError: the model cannot be cut as asked.
    """
    settled = settle(spec, found, cluster_resources)
    plan = replace(plan or unmeasured_plan(settled, found), epoch=epoch, version=1)
    counts = tuple(stop - first for first, stop in plan.layers)
    pipeline = settled.pipeline.model_copy(
        update={
            "ranks": plan.world_size,
            "schedule": plan.schedule,
            "chunks": plan.chunks,
            "microbatches": plan.microbatches,
            "partition": counts,
        }
    )
    elastic = settle_elastic(settled.elastic, plan.world_size)
    plan = replace(plan, standbys=_standbys(plan, elastic, found))
    settled = settled.model_copy(update={"pipeline": pipeline, "elastic": elastic})
    schedule = expand(plan)
    device = settled.cluster.device
    assert device != AUTO
    config = WorkerConfig(
        job=spec.job.name,
        seed=spec.job.seed,
        steps=spec.job.steps,
        precision=spec.job.precision,
        threads=spec.job.threads,
        validate_every=spec.job.validate_every,
        curvature_every=spec.job.curvature_every,
        sample_tokens=spec.job.sample_tokens if found.language else 0,
        output=spec.job.folder,
        device=device,
        microbatch_size=pipeline.microbatch_size,
        microbatches=plan.microbatches,
        replicas=plan.replicas,
        model=settled.model,
        data=settled.data,
        optimizer=settled.optimizer,
        checkpoint=settled.checkpoint,
        emulated=found.emulated,
        freeze=settled.freeze,
        elastic=settled.elastic,
    )
    return Resolved(spec=settled, config=config, plan=plan, schedule=schedule, outline=found)


def _standbys(plan: Plan, elastic: ElasticConfig, found: ModelOutline) -> tuple[tuple[int, ...], ...]:
    """Those of `plan`; where it says nothing and should, as if all its places were on one node."""
    if elastic.redundancy != "peer":
        return ()
    return plan.standbys or assign(plan, ("",) * plan.world_size, found.parameters)


def unmeasured_plan(spec: Spec, found: ModelOutline) -> Plan:
    """The plan of a settled spec whose ranks, schedule and microbatches are given, and whose cut needs no profile.

    Raises:
        JobError: the model cannot be cut as asked.
    """
    pipeline = spec.pipeline
    schedule = base_schedule(pipeline)
    _check_stages(spec, schedule, found)
    counts = None if isinstance(pipeline.partition, str) else pipeline.partition
    how = "balanced by parameter count" if counts is None else "as the spec asks"
    recompute = recomputed_layers(spec, len(found.layers))
    try:
        return unmeasured.unmeasured_plan(
            schedule,
            found.parameters,
            counts=counts,
            replicas=pipeline.replicas,
            recompute=recompute,
            reason=f"first plan: {len(found.layers)} layers cut {how}",
        )
    except ValueError as error:
        raise JobError(f"pipeline.{error}") from error


def expand(plan: Plan) -> Schedule:
    """The validated schedule that `plan` names, with its recomputations.

    Raises:
        JobError: a table of the user's own that is not what it was, or is gone.
    """
    if not plan.schedule.startswith(CSV_PREFIX):
        return schedule_of(plan)
    pipeline = PipelineConfig(
        ranks=plan.pipeline_ranks, schedule=plan.schedule, microbatches=plan.microbatches
    )
    return schedule_of(plan, base_schedule(pipeline))


def recomputed_layers(spec: Spec, layers: int) -> tuple[int, ...]:
    """The layers that `spec` recomputes, of a model with `layers` of them.

    Raises:
        JobError: a layer that the model does not have.
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


def _check_stages(spec: Spec, schedule: Schedule, found: ModelOutline) -> None:
    """Raises:
    JobError: more stages than the model has layers.
    """
    layers, stages = len(found.layers), schedule.stages
    if stages > layers:
        per_rank = stages // schedule.ranks
        each = f" x {per_rank} stages each" if per_rank > 1 else ""
        raise JobError(
            f"pipeline.ranks = {spec.pipeline.ranks} is more than the model can fill: {schedule.ranks} ranks"
            f" per pipeline{each} are {stages} stages, and the model has {layers} layers"
            f" ({', '.join(found.layers)}). Use at most {layers // per_rank * spec.pipeline.replicas} ranks,"
            " or more layers"
        )


def _settle_table(pipeline: PipelineConfig) -> PipelineConfig:
    """`pipeline` with the numbers that a table of the user's own gives."""
    if not pipeline.schedule.startswith(CSV_PREFIX):
        return pipeline
    schedule = base_schedule(pipeline)
    return pipeline.model_copy(
        update={"ranks": schedule.ranks * pipeline.replicas, "microbatches": schedule.microbatches}
    )


def _settle_cluster(cluster: ClusterConfig, ranks: int, totals: Mapping[str, float]) -> ClusterConfig:
    given = cluster.resources_per_rank
    device = cluster.device
    if device == "auto":
        gpus = ranks * (given.get("GPU", 0.0) if given is not None else 1.0)
        device = "cuda" if 0 < gpus <= totals.get("GPU", 0.0) else "cpu"
    if given is None:
        given = {
            "cpu": {"CPU": 1.0},
            "cuda": {"CPU": 1.0, "GPU": 1.0},
            "emulated": {"CPU": EMULATED_CPU},
        }[device]
    return cluster.model_copy(update={"device": device, "resources_per_rank": given})


def _times(seconds: float | tuple[float, ...]) -> tuple[float, ...]:
    return seconds if isinstance(seconds, tuple) else (seconds,)
