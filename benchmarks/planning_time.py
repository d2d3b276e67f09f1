"""Processor time of planning: one simulation of a step, one prediction with memory, one search of the cuts.

    python -m benchmarks.planning_time [--rounds N]

Each schedule family cuts the same 48 random layers over 8 ranks with 32 microbatches. A prediction builds the costs
from the profile, simulates, and adds the memory of each rank; a search simulates hundreds of cuts. The graph of a
schedule is built once and is not in the figures. They are medians over the rounds, in processor time, which a busy
machine disturbs less.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from random import Random
from statistics import median
from time import process_time

from benchmarks.parts.random_pipelines import random_profile
from planner.search.search import Wish, choose
from planner.simulation.costs import action_costs
from planner.simulation.predict import predict
from planner.simulation.simulate import simulate

FAMILIES = ("1f1b", "interleaved", "zbv")
LAYERS, RANKS, MICROBATCHES = 48, 8, 32
REPEATS = 5
"""Simulations and predictions in a round, for each search."""


def spent_ms(work: Callable[[], object]) -> float:
    """Milliseconds of processor time that `work` takes."""
    begun_s = process_time()
    work()
    return 1e3 * (process_time() - begun_s)


def show(family: str, rounds: int) -> None:
    """Print the figures of one schedule family."""
    profile = random_profile(Random(3), LAYERS, RANKS)
    wish = Wish(ranks=RANKS, schedule=family, microbatches=MICROBATCHES, partition="dynpipe")
    # The first search builds what later ones find: the graphs of schedules.
    choice = choose(profile, wish)
    costs = action_costs(profile, choice.plan, choice.schedule)
    actions = sum(map(len, choice.schedule.programs))
    simulations, predictions, searches = [], [], []
    for _ in range(rounds):
        for _ in range(REPEATS):
            simulations.append(spent_ms(lambda: simulate(choice.schedule, costs)))
            predictions.append(
                spent_ms(lambda: predict(profile, choice.plan, choice.schedule).peak_memory_bytes)
            )
        searches.append(spent_ms(lambda: choose(profile, wish)))
    print(
        f"  {family:12} {actions:6,} actions  {median(simulations):10.2f} {median(predictions):10.2f}"
        f" {median(searches):10.0f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print(
        f"milliseconds of processor time, {LAYERS} layers, {RANKS} ranks, {MICROBATCHES} microbatches, median of"
        f" {REPEATS * options.rounds} simulations and predictions and of {options.rounds} searches:"
    )
    print(f"  {'schedule':27} {'simulation':>10} {'prediction':>10} {'search':>10}")
    for family in FAMILIES:
        show(family, options.rounds)


if __name__ == "__main__":
    main()
