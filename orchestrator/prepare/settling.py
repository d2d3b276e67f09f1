"""Rules that settle a checked spec, in the order in which facts arrive: model and data, cluster, plan. Pure but for
`opened`.

Rules that need the spec alone are in `spec/rules.py`; `preparation.py` chooses the plan and calls these. Later code
receives the settled value and applies none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from math import ceil

from orchestrator.prepare.model_outline import ModelOutline, outline_model
from orchestrator.spec.freeze_phases import settle_phases
from orchestrator.spec.freeze_prefix import check_prefix_fits, settle_checks
from orchestrator.spec.job_spec import ClusterConfig, Spec
from orchestrator.spec.rules import AUTO, given_shape, searched, settle_elastic
from planner.ir import Schedule
from planner.plan import Plan
from planner.profile import Profile
from planner.schedule.expand import schedule_of
from planner.schedule.table_format import CSV_PREFIX
from planner.search.candidate import Alternative
from planner.search.standbys import protected
from planner.wording import counted
from workers.config import AdaptConfig, ElasticConfig, WorkerConfig
from workers.data.sampling import LARGE
from workers.protocol.errors import JobError

EMULATED_CPU = 0.05
"""CPUs that an emulated rank reserves: it mostly sleeps."""


@dataclass(frozen=True, kw_only=True)
class Settled:
    """A job with nothing left to choose, and what chose it."""

    spec: Spec
    outline: ModelOutline
    plan: Plan
    """The first one."""
    schedule: Schedule
    profile: Profile | None = None
    """The profile that the plan is based on; None if it needs none, or if a kept plan's is gone."""
    alternatives: tuple[Alternative, ...] = ()
    """The plans that it was chosen from."""
    forest: bytes | None = field(default=None, repr=False)
    """The machine's interference model, if the job adapts by one."""

    @cached_property
    def config(self) -> WorkerConfig:
        """The sections that ranks use."""
        return self.spec.for_ranks


def opened(spec: Spec) -> tuple[Spec, ModelOutline]:
    """Open the model and the data of a checked spec, and settle it by them. Imports torch.

    Raises:
        JobError: as `outline_model` and `with_model`.
    """
    found = outline_model(spec)
    return with_model(spec, found), found


def with_model(spec: Spec, found: ModelOutline) -> Spec:
    """`spec` with the vocabulary, digests, tokens to sample and modelled times of its model and data.

    Raises:
        JobError: the model has too few layers, or there is nothing to freeze.
    """
    check_layers(spec, found)
    check_prefix_fits(spec.freeze, len(found.layers))
    if (
        spec.freeze.timely
        and spec.cluster.device == "emulated"
        and not any(_times(found.emulated.weight_grad_s))
    ):
        raise JobError(
            f"freeze.method = {spec.freeze.method!r}, but cluster.emulated.weight_grad_s is 0: there are no weight"
            ' gradients to skip; give them a time, or set freeze.method = "none"'
        )
    if spec.data.buckets > max(1, found.train_samples):
        raise JobError(
            f"data.buckets = {spec.data.buckets}, and there are {counted(found.train_samples, 'training sample')}: use"
            " fewer parts"
        )
    shuffle = spec.data.shuffle or ("feistel" if found.train_samples >= LARGE else None)
    return spec.model_copy(
        update={
            "job": spec.job if found.language else spec.job.model_copy(update={"sample_tokens": 0}),
            "model": spec.model.settled(
                vocabulary=found.vocabulary, weights=found.weights, weights_sha256=found.weights_sha256
            ),
            "data": spec.data.model_copy(update={"sha256": found.data_sha256, "shuffle": shuffle}),
            "cluster": spec.cluster.model_copy(update={"emulated": found.emulated}),
        }
    )


def on_cluster(spec: Spec, totals: Mapping[str, float]) -> Spec:
    """`spec` with the device and the resources of its ranks.

    Args:
        totals: resources of the cluster, for `cluster.device = "auto"`.
    """
    pipeline = spec.pipeline
    least = pipeline.pipeline_count if pipeline.ranks == AUTO else pipeline.ranks
    return spec.model_copy(update={"cluster": _settle_cluster(spec.cluster, least, totals)})


def with_plan(
    spec: Spec,
    found: ModelOutline,
    plan: Plan,
    *,
    epoch: int,
    profile: Profile | None = None,
    alternatives: tuple[Alternative, ...] = (),
) -> Settled:
    """The job that begins with `plan`.

    Args:
        spec: settled by its model and its cluster.
        epoch: incarnation of the controller.
        profile: what the plan is based on.
        alternatives: what it was chosen from.

    Raises:
        JobError: as `elastic_of` and `with_steps`.
    """
    plan = replace(plan, epoch=epoch, version=1)
    table = spec.table if plan.schedule.startswith(CSV_PREFIX) else None
    elastic = elastic_of(spec, plan)
    plan = _protected(plan, elastic, found)
    spec = with_steps(spec, found, plan)
    numbers = {
        "ranks": plan.world_size,
        "schedule": plan.schedule,
        "chunks": plan.chunks,
        "microbatches": plan.microbatches,
        "partition": plan.layers_per_stage,
    }
    settled = {
        "pipeline": spec.pipeline.model_copy(update=numbers),
        "elastic": elastic,
        "adapt": _settle_adapt(spec.adapt, step_samples(spec, plan), found),
    }
    return Settled(
        spec=spec.model_copy(update=settled),
        outline=found,
        plan=plan,
        schedule=schedule_of(plan, table),
        profile=profile,
        alternatives=alternatives,
    )


def step_samples(spec: Spec, plan: Plan) -> int:
    """Samples of a step."""
    return plan.replicas * plan.microbatches * spec.pipeline.microbatch_size


def with_steps(spec: Spec, found: ModelOutline, plan: Plan) -> Spec:
    """`spec` with the steps that its epochs take, the phases of freezing in them, and the steps between its checks.

    Raises:
        JobError: `job.steps` says otherwise than its epochs, or the job is too short for the phases.
    """
    job, samples = spec.job, step_samples(spec, plan)
    freeze = settle_checks(spec.freeze, ceil(found.train_samples / samples))
    if job.epochs is not None:
        passes = Fraction(str(job.epochs))  # as it is written: 0.1 is a tenth
        steps = ceil(passes * found.train_samples / samples)
        # A resolved spec says both.
        if "steps" in job.model_fields_set and job.steps != steps:
            raise JobError(
                f"job.epochs = {job.epochs:g} takes {counted(steps, 'step')} of {counted(samples, 'sample')}, and"
                f" job.steps = {job.steps} says otherwise: leave one out (--set job.epochs=null)"
            )
        job = job.model_copy(update={"steps": steps})
        freeze = settle_phases(freeze, spec.optimizer, job.steps)
    return spec.model_copy(update={"job": job, "freeze": freeze})


def elastic_of(spec: Spec, plan: Plan) -> ElasticConfig:
    """`[elastic]` of a checked spec, settled for the ranks of `plan`; what `auto` has chosen, its copies say.

    Raises:
        JobError: as for `settle_elastic`, if a search has chosen the ranks.
    """
    elastic = spec.elastic
    if spec.pipeline.ranks == AUTO:
        elastic = settle_elastic(elastic, plan.world_size)
    if elastic.redundancy != AUTO:
        return elastic
    if not plan.standbys and not plan.snapshots:
        return elastic.model_copy(update={"redundancy": "checkpoint"})
    return elastic.model_copy(update={"redundancy": "peer", "copy_every": plan.snapshot_every or 1})


def check_layers(spec: Spec, found: ModelOutline) -> None:
    """Raises:
    JobError: the spec names a layer that the model does not have, or more stages than it has layers.
    """
    layers, wanted = len(found.layers), spec.pipeline.recompute
    beyond = [] if isinstance(wanted, bool) else [layer for layer in wanted if layer >= layers]
    if beyond:
        raise JobError(
            f"pipeline.recompute names layer {beyond[0]}, but the model has layers 0 to {layers - 1}"
        )
    if searched(spec.pipeline):
        return
    shape = given_shape(spec)
    if shape.stages > layers:
        per_rank = shape.stages // shape.ranks
        each = f" x {per_rank} stages each" if per_rank > 1 else ""
        raise JobError(
            f"pipeline.ranks = {spec.pipeline.ranks} is more than the model can fill: {counted(shape.ranks, 'rank')}"
            f" per pipeline{each} are {counted(shape.stages, 'stage')}, and the model has {counted(layers, 'layer')}"
            f" ({', '.join(found.layers)}). Use at most"
            f" {counted(layers // per_rank * spec.pipeline.pipeline_count, 'rank')},"
            " or more layers"
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


def _settle_adapt(adapt: AdaptConfig, step_samples: int, found: ModelOutline) -> AdaptConfig:
    """`adapt` with the steps of an epoch."""
    if adapt.policy != "epoch" or adapt.epoch_steps is not None:
        return adapt
    return adapt.model_copy(update={"epoch_steps": max(1, found.train_samples // step_samples)})


def _protected(plan: Plan, elastic: ElasticConfig, found: ModelOutline) -> Plan:
    """`plan` with its copies; if it lacks them, placed as if each place were on a node of its own."""
    if elastic.redundancy == "peer" and (plan.standbys or plan.snapshots):
        return plan
    nodes = tuple(f"node {place}" for place in range(plan.world_size))
    return protected(plan, nodes, found.parameters, elastic.peer_copies, elastic.copy_every)


def _times(seconds: float | tuple[float, ...]) -> tuple[float, ...]:
    return seconds if isinstance(seconds, tuple) else (seconds,)
