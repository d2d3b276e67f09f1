"""A job of emulated ranks of equal layers, some of which become slow, and the best cut for it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

from benchmarks.parts.process_jobs import made_profile
from benchmarks.parts.settled_job import settled
from orchestrator.prepare.settling import Settled
from orchestrator.spec.job_spec import ClusterConfig, JobConfig, PipelineConfig, Spec
from planner.profile import Profile
from planner.schedule.expand import schedule_of
from planner.simulation.predict import predict
from workers.config import AdaptConfig, DataConfig, ElasticConfig, EmulatedConfig, ModelConfig


def job(
    folder: Path,
    policy: str,
    steps: int,
    given: argparse.Namespace,
    counts: tuple[int, ...] | None = None,
) -> Settled:
    """The job; with `counts` layers per rank, else as many for each.

    Args:
        given: its sizes: `layers`, `ranks`, `microbatches`, `schedule`, and `pass_ms`, of a layer and microbatch.
    """
    pass_s = given.pass_ms / 1e3
    text = folder / "text.txt"
    text.write_text("".join(f"{number} sheep jump over {number + 1} fences\n" for number in range(2000)))
    per_rank = given.layers // given.ranks
    spec = Spec(
        job=JobConfig(name=policy, output=str(folder / policy), steps=steps, sample_tokens=0),
        model=ModelConfig(family="gpt", layers=given.layers - 2, width=16, heads=2, context=16),
        data=DataConfig(source="text", path=str(text)),
        pipeline=PipelineConfig(
            ranks=given.ranks,
            microbatches=given.microbatches,
            microbatch_size=1,
            schedule=given.schedule,
            partition=counts or (per_rank,) * given.ranks,
        ),
        cluster=ClusterConfig(
            device="emulated",
            emulated=EmulatedConfig(forward_s=pass_s, input_grad_s=pass_s, weight_grad_s=pass_s),
        ),
        elastic=ElasticConfig(grow=False, allow_faults=True),
        adapt=AdaptConfig.model_validate({"policy": policy}),
    )
    return settled(spec)


def profile_of(made: Settled, given: argparse.Namespace) -> Profile:
    """The profile of its equal layers and ranks."""
    outline = made.outline
    weights = [given.pass_ms / 10] * given.layers
    return made_profile(outline.layers, outline.parameters, given.ranks, weights=weights)


def cuts(layers: int, ranks: int, slow: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Layers per rank: each slow rank the same number, the others the rest, extras at the front, the middle or the
    end."""
    fast = [rank for rank in range(ranks) if rank not in slow]
    for few in range(1, layers // ranks + 1):
        rest = layers - few * len(slow)
        each, extra = divmod(rest, len(fast))
        for begin in range(len(fast) - extra + 1):
            counts = [few] * ranks
            for number, rank in enumerate(fast):
                counts[rank] = each + (begin <= number < begin + extra)
            yield tuple(counts)


def best_cut(
    made: Settled, profile: Profile, slow: Sequence[int], factor: float
) -> tuple[float, tuple[int, ...]]:
    """The least simulated step of all `cuts`, and the layers per rank with which it is reached."""
    devices = tuple(
        replace(device, slowdown=factor if rank in slow else 1.0)
        for rank, device in enumerate(profile.cluster.devices)
    )
    slowed = replace(profile, cluster=replace(profile.cluster, devices=devices))
    plan, found = replace(made.plan, standbys=()), []
    for counts in cuts(plan.layers[-1][1], plan.pipeline_ranks, slow):
        cut = replace(plan, layers=tuple(pairwise((0, *accumulate(counts)))))
        found.append((predict(slowed, cut, schedule_of(cut)).step_s, counts))
    return min(found)
