"""From a spec to what the ranks are told: every `auto` settled, the first plan, its schedule.

`survey` opens model and data (and imports torch for that), so that a user's mistakes come out before any
actor starts; `resolve` is pure.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.spec import ClusterConfig, Spec
from orchestrator.spec_checks import base_schedule, with_recompute
from planner.ir import Schedule
from planner.partition import explicit, parameter
from planner.plan import Plan
from workers.config import EmulatedConfig, WorkerConfig
from workers.protocol import JobError

EMULATED_CPU = 0.05
"""What an emulated rank reserves of a CPU: it mostly sleeps."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What a spec does not say of its model and data."""

    layers: tuple[str, ...]
    """Names, in order."""
    parameters: tuple[int, ...]
    """Per layer, its number of parameters."""
    vocabulary: int | None
    """Tokens that the data's tokenizer knows."""
    language: bool
    """Whether text can be sampled from the model."""
    emulated: EmulatedConfig
    """The modelled times, per layer if the device is emulated."""


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """Everything a job is told."""

    spec: Spec
    """With nothing left to choose."""
    config: WorkerConfig
    plan: Plan
    schedule: Schedule
    survey: Survey

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


def absolute(spec: Spec) -> Spec:
    """`spec` with every path absolute: ranks run in another folder than the one it was written for."""
    data, cluster = spec.data, spec.cluster
    paths = (data.path,) if isinstance(data.path, str) else data.path or ()
    changes = {
        "job": spec.job.model_copy(update={"output": _absolute(spec.job.folder)}),
        "data": data.model_copy(
            update={
                "path": tuple(map(_absolute, paths)) or None,
                "tokenizer": data.tokenizer if data.tokenizer == "bytes" else _absolute(data.tokenizer),
                "cache": _absolute(data.cache) if data.cache is not None else None,
            }
        ),
        "cluster": cluster.model_copy(
            update={
                "emulated": cluster.emulated.model_copy(
                    update={
                        "profile": _absolute(cluster.emulated.profile) if cluster.emulated.profile else None
                    }
                )
            }
        ),
    }
    return spec.model_copy(update=changes)


def survey(spec: Spec) -> Survey:
    """Open the model's outline and the data of an `absolute` spec. Imports torch.

    Raises:
        JobError: a factory, a source or a size that does not work.
    """
    from workers.data.registry import open_dataset
    from workers.devices.emulated import layer_times
    from workers.models.outline import outline
    from workers.models.registry import build_definition

    data = open_dataset(spec.data, spec.model, spec.job.folder)
    definition = build_definition(spec.model, data.vocabulary)
    outlines = outline(definition)
    emulated = spec.cluster.emulated
    if spec.cluster.device == "emulated":
        emulated = EmulatedConfig.model_validate(layer_times(emulated, len(outlines)))
    return Survey(
        layers=tuple(layer.name for layer in outlines),
        parameters=tuple(layer.parameters for layer in outlines),
        vocabulary=data.vocabulary,
        language=definition.language and data.tokenizer is not None,
        emulated=emulated,
    )


def resolve(spec: Spec, found: Survey, cluster_resources: Mapping[str, float], *, epoch: int) -> Resolved:
    """What the job is told.

    Args:
        spec: with absolute paths.
        cluster_resources: totals of the cluster, for `cluster.device = "auto"`.
        epoch: incarnation of the controller.

    Raises:
        JobError: the model cannot be cut as asked.
    """
    pipeline = spec.pipeline
    schedule = base_schedule(pipeline)
    layers = _cut(spec, schedule, found)
    recompute = _recompute(spec, len(found.layers))
    stage_ranks = tuple(schedule.rank_of_stage[stage] for stage in range(schedule.stages))
    chunks = max(stage_ranks.count(rank) for rank in stage_ranks)
    cluster = _settle_cluster(spec.cluster, pipeline.ranks, cluster_resources)
    assert cluster.device != "auto"
    counts = tuple(stop - first for first, stop in layers)
    settled = spec.model_copy(
        update={
            "model": spec.model.model_copy(update={"vocabulary": spec.model.vocabulary or found.vocabulary}),
            "pipeline": pipeline.model_copy(update={"chunks": chunks, "partition": counts}),
            "cluster": cluster.model_copy(update={"emulated": found.emulated}),
        }
    )
    how = "balanced by parameter count" if pipeline.partition == "parameter" else "as the spec asks"
    plan = Plan(
        epoch=epoch,
        version=1,
        reason=f"first plan: {len(found.layers)} layers cut {how}",
        layers=layers,
        stage_ranks=stage_ranks,
        schedule=pipeline.schedule,
        chunks=chunks,
        microbatches=pipeline.microbatches,
        replicas=pipeline.replicas,
        recompute=recompute,
    )
    config = WorkerConfig(
        job=spec.job.name,
        seed=spec.job.seed,
        steps=spec.job.steps,
        precision=spec.job.precision,
        threads=spec.job.threads,
        validate_every=spec.job.validate_every,
        sample_tokens=spec.job.sample_tokens if found.language else 0,
        output=spec.job.folder,
        device=cluster.device,
        microbatch_size=pipeline.microbatch_size,
        microbatches=pipeline.microbatches,
        replicas=pipeline.replicas,
        model=settled.model,
        data=settled.data,
        optimizer=settled.optimizer,
        checkpoint=settled.checkpoint,
        emulated=found.emulated,
    )
    return Resolved(
        spec=settled,
        config=config,
        plan=plan,
        schedule=with_recompute(schedule, layers, set(recompute)),
        survey=found,
    )


def _cut(spec: Spec, schedule: Schedule, found: Survey) -> tuple[tuple[int, int], ...]:
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
    try:
        if spec.pipeline.partition == "parameter":
            return parameter.partition(found.parameters, stages)
        return explicit.partition(spec.pipeline.partition, layers, stages)
    except ValueError as error:
        raise JobError(f"pipeline.{error}") from error


def _recompute(spec: Spec, layers: int) -> tuple[int, ...]:
    wanted = spec.pipeline.recompute
    if isinstance(wanted, bool):
        return tuple(range(layers)) if wanted else ()
    beyond = [layer for layer in wanted if layer >= layers]
    if beyond:
        raise JobError(
            f"pipeline.recompute names layer {beyond[0]}, but the model has layers 0 to {layers - 1}"
        )
    return tuple(sorted(set(wanted)))


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


def _absolute(path: str) -> str:
    """`path` as the driver's folder makes it; a URI stays, unless it is a local file's."""
    path = path.removeprefix("file://")
    return path if "://" in path else os.path.abspath(os.path.expanduser(path))
