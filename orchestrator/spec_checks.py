"""What can be told wrong with a spec from the spec alone, before torch, Ray or the data are touched."""

from __future__ import annotations

from orchestrator.spec import PipelineConfig, Spec
from workers.protocol import JobError

CHUNKED = ("interleaved", "zbv")
"""Families that hold several stages per rank."""


def check(spec: Spec) -> None:
    """Refuse a spec whose keys do not fit together.

    Raises:
        JobError: names the keys, their values and the way out.
    """
    _check_ranks(spec.pipeline)
    _check_partition(spec.pipeline)
    _check_device(spec)


def pipeline_ranks(pipeline: PipelineConfig) -> int:
    """P, the ranks of one replica's pipeline."""
    return pipeline.ranks // pipeline.replicas


def chunks(pipeline: PipelineConfig) -> int:
    """Stages per rank, given or by the schedule's default."""
    if pipeline.chunks is not None:
        return pipeline.chunks
    return 2 if pipeline.schedule in CHUNKED else 1


def _check_ranks(pipeline: PipelineConfig) -> None:
    if pipeline.ranks % pipeline.replicas:
        below = pipeline.ranks // pipeline.replicas * pipeline.replicas
        near = f"{below} or {below + pipeline.replicas}" if below else f"{pipeline.replicas}"
        raise JobError(
            f"pipeline.ranks = {pipeline.ranks} is not divisible by pipeline.replicas = {pipeline.replicas}:"
            f" ranks counts the ranks of all replicas, choose {near}"
        )


def _check_partition(pipeline: PipelineConfig) -> None:
    if pipeline.partition == "parameter" or pipeline.schedule.startswith("csv:"):
        return
    stages = pipeline_ranks(pipeline) * chunks(pipeline)
    if len(pipeline.partition) != stages:
        raise JobError(
            f"pipeline.partition lists {len(pipeline.partition)} stages, but there are {stages}:"
            f" {pipeline_ranks(pipeline)} ranks per pipeline x {chunks(pipeline)} stages each;"
            f" give {stages} numbers of layers, or change pipeline.ranks"
        )


def _check_device(spec: Spec) -> None:
    resources = spec.cluster.resources_per_rank
    if spec.cluster.device == "cuda" and resources is not None and "GPU" not in resources:
        raise JobError(
            "cluster.device = 'cuda', but cluster.resources_per_rank reserves no GPU:"
            " add GPU = 1, or a fraction where ranks share one"
        )
