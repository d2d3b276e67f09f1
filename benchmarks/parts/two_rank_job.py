"""A job that two real CPU ranks train, as several benchmarks do: its plan, its profile, and what its steps take."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.parts.configs import changed
from planner.plan import Plan
from planner.profile import Profile
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
from workers.launch.profile import ProfileRequest, profile_processes
from workers.launch.ranks import LaunchedJob, run_processes
from workers.profiling.measured import combine
from workers.protocol.reports import StepReport

RANKS = 2
LAYERS = 8
"""Layers between the first and the last, of a model whose section does not say it."""
WARM_UP = 2
"""Steps at the beginning of a run that no figure counts."""


def make_job(schedule: str, steps: int, output: Path, **changes: Any) -> LaunchedJob:
    """GPT of 8 layers, width 256, context 128, 8 microbatches of 4, on two CPU ranks of one thread."""
    config = WorkerConfig(
        job=JobConfig(
            name="pipelining", seed=1, steps=steps, timeline_every=0, sample_tokens=0, output=str(output)
        ),
        model=ModelConfig(family="gpt", layers=LAYERS, width=256, heads=4, context=128),
        data=DataConfig(validation_fraction=0.0),
        optimizer=OptimizerConfig(lr=1e-3, clip_norm=None, min_lr_fraction=1.0),
        pipeline=PipelineConfig(microbatches=8),
        cluster=ClusterConfig(device="cpu"),
    )
    config = changed(config, **changes)
    family = families()[schedule]
    chunks = family.default_chunks
    stages = family.stages(RANKS, chunks)
    layers = getattr(config.model, "layers", LAYERS)
    blocks = layers // stages
    # The embedding goes with the first blocks and the head with the last.
    cuts = [0] + [1 + blocks * (s + 1) for s in range(stages - 1)] + [layers + 2]
    plan = Plan(
        epoch=1,
        version=1,
        reason="benchmark",
        layers=tuple(pairwise(cuts)),
        stage_ranks=family.placement(RANKS, chunks),
        schedule=schedule,
        chunks=chunks,
        microbatches=config.microbatches,
        replicas=1,
    )
    return LaunchedJob(config, plan, build(schedule, RANKS, config.microbatches, chunks))


def profile_of(job: LaunchedJob) -> Profile:
    """The profile of `job`, measured on as many ranks as it has."""
    return combine(
        profile_processes(ProfileRequest(config=job.config, ranks=job.plan.world_size)), job.config
    )


def taken(job: LaunchedJob) -> dict[int, float]:
    """For each step but the first ones, the seconds from the commit before to its own."""
    committed_s = {r.step: r.committed_s for r in run_processes(job).reports if isinstance(r, StepReport)}
    return {step: time_s - committed_s[step - 1] for step, time_s in committed_s.items() if step > WARM_UP}
