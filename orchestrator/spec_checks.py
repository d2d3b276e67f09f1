"""What can be told wrong with a spec from the spec alone, before torch, Ray or the data are touched."""

from __future__ import annotations

from pathlib import Path

from orchestrator.spec import PipelineConfig, Spec
from planner import csv_format
from planner.ir import Schedule
from planner.passes import add_recompute
from planner.schedules import registry
from planner.validate import ScheduleError
from workers.protocol import JobError

CSV_PREFIX = "csv:"


def check(spec: Spec) -> None:
    """Refuse a spec whose keys do not fit together.

    Raises:
        JobError: names the keys, their values and the way out.
    """
    schedule = base_schedule(spec.pipeline)
    _check_partition(spec.pipeline, schedule)
    _check_device(spec)
    if "://" in spec.cluster.address and not spec.cluster.address.startswith("ray://"):
        raise JobError(
            f"cluster.address = {spec.cluster.address!r}: use local, auto, HOST:PORT, or ray://HOST:PORT"
        )


def pipeline_ranks(pipeline: PipelineConfig) -> int:
    """P, the ranks of one replica's pipeline.

    Raises:
        JobError: the ranks are not a multiple of the replicas.
    """
    if pipeline.ranks % pipeline.replicas:
        below = pipeline.ranks // pipeline.replicas * pipeline.replicas
        near = f"{below} or {below + pipeline.replicas}" if below else f"{pipeline.replicas}"
        raise JobError(
            f"pipeline.ranks = {pipeline.ranks} is not divisible by pipeline.replicas = {pipeline.replicas}:"
            f" ranks counts the ranks of all replicas, choose {near}"
        )
    return pipeline.ranks // pipeline.replicas


def base_schedule(pipeline: PipelineConfig) -> Schedule:
    """The validated schedule that `pipeline` names, for one replica, not yet knowing what is recomputed.

    Raises:
        JobError: no such schedule, a table with a mistake, or numbers that the family cannot be built with.
    """
    ranks = pipeline_ranks(pipeline)
    try:
        if not pipeline.schedule.startswith(CSV_PREFIX):
            return registry.build(pipeline.schedule, ranks, pipeline.microbatches, pipeline.chunks)
        if pipeline.chunks is not None:
            raise JobError("pipeline.chunks does not go with a csv: schedule, whose table places the stages")
        path = Path(pipeline.schedule.removeprefix(CSV_PREFIX))
        text = path.read_text(encoding="utf-8")
        return csv_format.parse(text, pipeline.schedule, ranks=ranks, microbatches=pipeline.microbatches)
    except ScheduleError as error:
        raise JobError(f"pipeline.schedule: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise JobError(f"pipeline.schedule = {pipeline.schedule!r}: cannot read it: {reason}") from error


def with_recompute(schedule: Schedule, layers: tuple[tuple[int, int], ...], recompute: set[int]) -> Schedule:
    """`schedule` with an R where a stage holds a layer of `recompute`; `layers`: [first, stop) per stage."""
    stages = [stage for stage, (first, stop) in enumerate(layers) if recompute & set(range(first, stop))]
    return add_recompute(schedule, stages) if stages else schedule


def _check_partition(pipeline: PipelineConfig, schedule: Schedule) -> None:
    if pipeline.partition != "parameter" and len(pipeline.partition) != schedule.stages:
        raise JobError(
            f"pipeline.partition lists {len(pipeline.partition)} stages, but {pipeline.schedule} on"
            f" {schedule.ranks} ranks has {schedule.stages}: give {schedule.stages} numbers of layers,"
            " or change pipeline.ranks"
        )


def _check_device(spec: Spec) -> None:
    resources = spec.cluster.resources_per_rank
    if spec.cluster.device == "cuda" and resources is not None and "GPU" not in resources:
        raise JobError(
            "cluster.device = 'cuda', but cluster.resources_per_rank reserves no GPU:"
            " add GPU = 1, or a fraction where ranks share one"
        )
