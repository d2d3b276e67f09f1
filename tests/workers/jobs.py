"""Jobs for engine tests: small, complete, and the same however they are run.

`FRESHET_TEST_DEVICE=cuda` in the environment has them all compute on this machine's first GPU.
"""

import os
from pathlib import Path
from typing import Any

import torch

from benchmarks.parts.configs import changed
from planner.plan import Plan
from planner.schedule.passes import add_recompute
from planner.schedule.registry import build, families
from workers.config import (
    ClusterConfig,
    DataConfig,
    JobConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    WorkerConfig,
)
from workers.launch.ranks import LaunchedJob

DEVICE = torch.device(os.environ.get("FRESHET_TEST_DEVICE", "cpu"))
os.environ.setdefault(
    "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
)  # read as CUDA starts, which may be in this process

FAMILIES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")


def small_config(output: Path, trait: str = "plain", **changes: Any) -> WorkerConfig:
    """The configuration of a job with 8 layers from `small_models`."""
    run = {
        "name": "small",
        "seed": 3,
        "steps": 5,
        "timeline_every": 0,
        "sample_tokens": 0,
        "output": str(output),
    }
    config = WorkerConfig(
        job=JobConfig.model_validate(run),
        model=ModelConfig(factory="small_models:model", arguments={"trait": trait}),
        data=DataConfig(source="small_models:Vectors"),
        optimizer=OptimizerConfig(lr=0.01, warmup_steps=2),
        pipeline=PipelineConfig(microbatch_size=2, microbatches=4),
        cluster=ClusterConfig.model_validate({"device": DEVICE.type}),
    )
    return changed(config, **changes)


def even(layers: int, stages: int) -> tuple[int, ...]:
    return tuple(layers // stages + (1 if i < layers % stages else 0) for i in range(stages))


def job(
    config: WorkerConfig,
    *,
    ranks: int = 1,
    schedule: str = "gpipe",
    counts: tuple[int, ...] | None = None,
    layers: int = 8,
    recompute: bool | tuple[int, ...] = False,
    **fields: Any,
) -> LaunchedJob:
    """A job of `config` on `ranks` ranks per pipeline. `counts` has the layers per stage, by default even."""
    family = families()[schedule]
    chunks = family.default_chunks
    stages = family.stages(ranks, chunks)
    counts = counts or even(layers, stages)
    assert len(counts) == stages
    starts = [sum(counts[:i]) for i in range(stages)]
    table = build(schedule, ranks, config.microbatches, chunks)
    again = recompute if isinstance(recompute, tuple) else tuple(range(sum(counts))) if recompute else ()
    if again:
        cuts = enumerate(zip(starts, counts, strict=True))
        table = add_recompute(table, [s for s, (at, n) in cuts if set(again) & set(range(at, at + n))])
    plan = Plan(
        epoch=1,
        version=1,
        reason="test",
        layers=tuple((s, s + c) for s, c in zip(starts, counts, strict=True)),
        stage_ranks=family.placement(ranks, chunks),
        schedule=schedule,
        chunks=chunks,
        microbatches=config.microbatches,
        replicas=config.pipeline.replicas,
        recompute=again,
    )
    return LaunchedJob(config, plan, table, **fields)
