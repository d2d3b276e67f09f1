"""Partition programs against brute force, the chosen plan against every simulated cut, and planning time.

    python -m benchmarks.partition [--instances N] [--searches N]

Nothing is trained: costs are drawn at random, and steps are simulated.
"""

from __future__ import annotations

import argparse
from collections import Counter
from random import Random
from statistics import median
from time import perf_counter

from benchmarks.parts.optimality import PROGRAMS, deviation, end_to_end_deviation, regret, small_instance
from benchmarks.parts.random_pipelines import random_profile
from planner.partition.stage_costs import StageCosts
from planner.schedule.registry import build
from planner.search import end_to_end
from planner.search.search import PlanWish, choose


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
        wishes = {"plan": PlanWish(ranks=devices, schedule="1f1b", microbatches=2 * devices)}
        if devices <= 8:
            wishes["plan, auto"] = PlanWish(ranks=None, schedule=None, microbatches=None)
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
