"""How far plans are from the optimum: partition programs, Algorithm 1 and the chosen plan, beside every cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

from benchmarks.parts.brute_force import (
    Objective,
    all_cuts,
    all_pipelines,
    fullest_share,
    iteration_s,
    merged_s,
    slowest_resource_s,
    slowest_stage_s,
)
from benchmarks.parts.random_pipelines import random_profile, with_memory
from planner.partition import bottleneck, dynpipe, memory, time
from planner.partition.stage_costs import Ranges, StageCosts
from planner.profile import Profile
from planner.schedule.registry import build, families
from planner.search import end_to_end
from planner.search.evaluate import Evaluator
from planner.search.search import ChosenPlan, PlanWish, choose
from planner.search.shapes import PipelineShape

PROGRAMS: Mapping[str, tuple[Callable[[StageCosts], Ranges], Objective]] = {
    "memory": (memory.partition, fullest_share),
    "time": (time.partition, slowest_stage_s),
    "bottleneck": (bottleneck.partition, slowest_resource_s),
    "dynpipe": (dynpipe.partition, merged_s),
}
Instance = tuple[Profile, int, int]
"""Profile, stages, microbatches."""


def small_instance(rng: Random) -> Instance:
    """Up to 9 layers on up to 5 devices. Half the instances are short of memory, but some cut always fits."""
    stages = rng.randint(1, 5)
    layers, microbatches = rng.randint(max(2, stages), 9), rng.randint(1, 8)
    profile = random_profile(rng, layers, stages)
    if rng.random() < 0.5:
        needs = sorted(fullest_share(profile, cut, microbatches) for cut in all_cuts(layers, stages))
        share = rng.choice(needs[: len(needs) // 2 + 1])
        profile = with_memory(profile, round(share * profile.cluster.devices[0].memory_bytes) + 1)
    return profile, stages, microbatches


def deviation(name: str, instance: Instance) -> float:
    """How much worse a program's cut is than the best cut that fits, under its own objective, as a share."""
    profile, stages, microbatches = instance
    program, objective = PROGRAMS[name]
    cut = program(StageCosts.of(profile, build("1f1b", stages, microbatches)))
    best = min(
        objective(profile, each, microbatches)
        for each in all_cuts(len(profile.model.layers), stages)
        if name == "memory" or fullest_share(profile, each, microbatches) <= 1
    )
    assert name == "memory" or fullest_share(profile, cut, microbatches) <= 1
    return objective(profile, cut, microbatches) / best - 1


def end_to_end_deviation(rng: Random) -> float:
    """How much worse Algorithm 1's answer is than the best of all pipelines, as a share. Stages have up to
    two devices, and T(S) grows."""
    devices, microbatches = rng.randint(1, 5), rng.randint(1, 8)
    layers = rng.randint((devices + 1) // 2, 7)
    profile = random_profile(rng, layers, devices)
    sizes = (1, 2)
    growth = rng.uniform(0, 0.3)
    found = end_to_end.plan(
        profile,
        lambda stages: 1 + growth * stages,
        microbatches=microbatches,
        sizes=sizes,
    )
    best = min(
        (1 + growth * stages) * microbatches * iteration_s(profile, pipeline, microbatches)
        for stages in range(1, layers + 1)
        for pipeline in all_pipelines(profile, stages, sizes)
    )
    return min(each.wall_clock_s for each in found) / best - 1


def regret(rng: Random) -> tuple[float, ChosenPlan]:
    """How much slower the chosen plan is than the best simulated cut that fits, as a share; and the choice.

    Families, chunks, ranks and microbatches are random too. Half the instances are short of memory.
    """
    name = rng.choice(list(families()))
    ranks = rng.randint(2, 3 if families()[name].default_chunks > 1 else 5)
    stages = families()[name].stages(ranks, families()[name].default_chunks)
    layers = rng.randint(stages + 1, 12)
    microbatches = ranks * rng.randint(1, 4)
    profile = random_profile(rng, layers, ranks)
    shape = PipelineShape(
        name=name, ranks=ranks, chunks=families()[name].default_chunks, microbatches=microbatches
    )
    judge = Evaluator(profile, shape, replicas=1, recompute=())
    predictions = [judge.predict(cut) for cut in all_cuts(layers, stages)]
    if rng.random() < 0.5:
        peaks = sorted(prediction.peak_memory_bytes for prediction in predictions)
        limit = rng.choice(peaks[: len(peaks) // 2 + 1])
        profile = with_memory(profile, limit)
        predictions = [each for each in predictions if each.peak_memory_bytes <= limit]
    choice = choose(profile, PlanWish(ranks=ranks, schedule=name, microbatches=microbatches))
    assert choice.prediction.fits
    return choice.prediction.step_s / min(each.step_s for each in predictions) - 1, choice
