"""Time from a rank's report of a fall of its memory to the plan that relieves it.

    python -m benchmarks.memory_relief [--rounds N]

Random layers are cut evenly; one rank in the middle then has four fifths of the memory that its plan takes. The
decision is the whole search of the fastest cut within the limits, as the controller makes it
(`planner/adapt/memory_pressure.py`). The figures are wall-clock medians over the rounds, and the largest.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from random import Random
from statistics import median
from time import perf_counter

from benchmarks.parts.random_pipelines import random_profile
from benchmarks.parts.targets import under
from planner.adapt.memory_pressure import limit_after_fall, relieve
from planner.search.replan import Replanner
from planner.search.search import PlanWish, choose

SIZES = ((8, 64, 32), (16, 64, 32), (32, 128, 64))
"""(ranks, layers, microbatches)."""
LIMIT_S = 0.5
"""DynPipe section V-B: "within a few hundred milliseconds"."""


def times_s(ranks: int, layers: int, microbatches: int, rounds: int) -> list[float]:
    """Seconds of each decision; each has another profile, so that nothing is remembered."""
    found: list[float] = []
    for seed in range(rounds):
        profile = random_profile(Random(seed), layers, ranks)
        wish = PlanWish(ranks=ranks, schedule="1f1b", microbatches=microbatches, partition="bottleneck")
        choice = choose(profile, wish)
        planner = Replanner(
            first=choice.plan,
            schedule=choice.schedule,
            parameters=tuple(layer.parameters for layer in profile.model.layers),
            copies=0,
            profile=profile,
        )
        place, where = ranks // 2, ("",) * ranks
        lacking = choice.prediction.memory.peak_bytes[place] // 5
        begun_s = perf_counter()
        limit = limit_after_fall(planner, choice.plan, place, lacking)
        limited = replace(planner, limits=(None,) * place + (limit,))
        plan, why = relieve(limited, choice.plan, where, (None,) * ranks)
        found.append(perf_counter() - begun_s)
        assert plan is not None, why
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    print(f"from the report to the plan, median (largest) of {rounds}:")
    for ranks, layers, microbatches in SIZES:
        taken = times_s(ranks, layers, microbatches, rounds)
        text = f"{median(taken):.3f} s ({max(taken):.3f})"
        print(
            f"  {ranks} ranks, {layers} layers, {microbatches} microbatches: {under(text, median(taken), LIMIT_S)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
