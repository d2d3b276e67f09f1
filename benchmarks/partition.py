"""Partition programs against brute force, the chosen plan against every simulated cut, and planning time.

    python -m benchmarks.partition [--instances N] [--searches N]

Nothing is trained: costs are drawn at random, and steps are simulated.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from statistics import median
from time import perf_counter

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
from benchmarks.parts.random_pipelines import random_profile
from planner.partition import bottleneck, dynpipe, memory, time
from planner.partition.stage_costs import Ranges, StageCosts
from planner.profile import Profile
from planner.schedule.registry import build, families
from planner.search import end_to_end
from planner.search.evaluate import Evaluator
from planner.search.search import Choice, Wish, choose
from planner.search.shapes import Shape

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


def with_memory(profile: Profile, memory_bytes: int) -> Profile:
    """`profile` with `memory_bytes` on every device."""
    devices = tuple(replace(device, memory_bytes=memory_bytes) for device in profile.cluster.devices)
    return replace(profile, cluster=replace(profile.cluster, devices=devices))


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


def regret(rng: Random) -> tuple[float, Choice]:
    """How much slower the chosen plan is than the best simulated cut that fits, as a share; and the choice.

    Families, chunks, ranks and microbatches are random too. Half the instances are short of memory.
    """
    name = rng.choice(list(families()))
    ranks = rng.randint(2, 3 if families()[name].default_chunks > 1 else 5)
    stages = families()[name].stages(ranks, families()[name].default_chunks)
    layers = rng.randint(stages + 1, 12)
    microbatches = ranks * rng.randint(1, 4)
    profile = random_profile(rng, layers, ranks)
    shape = Shape(name=name, ranks=ranks, chunks=families()[name].default_chunks, microbatches=microbatches)
    judge = Evaluator(profile, shape, replicas=1, recompute=())
    predictions = [judge.predict(cut) for cut in all_cuts(layers, stages)]
    if rng.random() < 0.5:
        peaks = sorted(prediction.peak_memory_bytes for prediction in predictions)
        limit = rng.choice(peaks[: len(peaks) // 2 + 1])
        profile = with_memory(profile, limit)
        predictions = [each for each in predictions if each.peak_memory_bytes <= limit]
    choice = choose(profile, Wish(ranks=ranks, schedule=name, microbatches=microbatches))
    assert choice.prediction.fits
    return choice.prediction.step_s / min(each.step_s for each in predictions) - 1, choice


def compare_with_brute_force(instances: int) -> None:
    print(
        f"programs against brute force, {instances} instances each, up to 9 layers and 5 devices, uneven links:"
    )
    for name in PROGRAMS:
        worst = max(deviation(name, small_instance(Random(seed))) for seed in range(instances))
        print(f"  {name:12} {worst:.1e} above the optimum at most", flush=True)
    worst = max(end_to_end_deviation(Random(seed)) for seed in range(instances))
    print(f"  {'end to end':12} {worst:.1e} above the optimum at most", flush=True)


def compare_with_all_simulated(searches: int) -> None:
    """Compare the chosen plan, and each program's own pick, with every possible cut."""
    taken: list[float] = []
    own: dict[str, list[float]] = {}
    names: Counter[str] = Counter()
    for seed in range(searches):
        above, choice = regret(Random(seed))
        taken.append(above)
        names.update(each.name for each in choice.alternatives if not each.why_not and each.name == "refined")
        best_s = choice.prediction.step_s / (1 + above)
        for name, pick in choice.programs.items():
            if pick.predicted_step_s is not None and "lacks" not in pick.why_not:
                own.setdefault(name, []).append(pick.predicted_step_s / best_s - 1)
    print(
        f"step time above the best simulated cut, {searches} instances (families, ranks, memory drawn too):"
    )
    for name, shares in {"plan taken": taken, **own}.items():
        shares.sort()
        exact = sum(share < 1e-9 for share in shares)
        tail = shares[int(0.95 * (len(shares) - 1))]
        print(
            f"  {name:12} best of all in {exact:3} of {len(shares)}, median {median(shares):.2%}, 95 of 100 within"
            f" {tail:.2%}, worst {shares[-1]:.2%}"
        )
    print(f"  refinement found the plan that was taken in {names['refined']}")


def time_programs() -> None:
    print("seconds of planning:")
    for layers, devices in ((96, 64), (1_000, 256)):
        profile = random_profile(Random(0), layers, devices)
        schedule = build("1f1b", devices, 2 * devices)
        for name, (program, _) in PROGRAMS.items():
            begun_s = perf_counter()
            program(StageCosts.of(profile, schedule))
            print(
                f"  {name:12} {layers:5} layers, {devices:3} devices  {perf_counter() - begun_s:8.3f}",
                flush=True,
            )
    profile = random_profile(Random(0), 96, 64)
    begun_s = perf_counter()
    end_to_end.plan(profile, lambda stages: 1.0, microbatches=128)
    print(f"  {'end to end':12} {96:5} layers,  64 devices  {perf_counter() - begun_s:8.3f}")
    for layers, devices in ((12, 4), (40, 8), (96, 64)):
        profile = random_profile(Random(0), layers, devices)
        wishes = {"plan": Wish(ranks=devices, schedule="1f1b", microbatches=2 * devices)}
        if devices <= 8:
            wishes["plan, auto"] = Wish(ranks=None, schedule=None, microbatches=None)
        for what, wish in wishes.items():
            begun_s = perf_counter()
            choose(profile, wish)
            print(
                f"  {what:12} {layers:5} layers, {devices:3} devices  {perf_counter() - begun_s:8.3f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--instances", type=int, default=1_000)
    parser.add_argument("--searches", type=int, default=200)
    options = parser.parse_args()
    compare_with_brute_force(options.instances)
    compare_with_all_simulated(options.searches)
    time_programs()


if __name__ == "__main__":
    main()
