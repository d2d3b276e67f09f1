"""Processor time of planning: one simulation of a step, one prediction with memory, one search of the cuts, one plan
after a loss.

    python -m benchmarks.planning_time [--rounds N] [--parts search,loss]

Each schedule family cuts the same 48 random layers over 8 ranks with 32 microbatches. A prediction builds the costs
from the profile, simulates, and adds the memory of each rank; a search simulates hundreds of cuts. The graph of a
schedule is built once and is not in the figures. They are medians over the rounds, in processor time, which a busy
machine disturbs less.

A plan after a loss is for one rank fewer than the job began with, each on a node of its own, with one copy of every
layer: 1,000 random layers, 128 microbatches. Each round asks a new planner, and what schedules' graphs leave behind is
forgotten before.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from random import Random
from statistics import median
from time import process_time

from benchmarks.parts.random_pipelines import random_profile
from benchmarks.parts.targets import under
from planner.schedule.graph import build_graph
from planner.schedule.registry import build, families
from planner.search.replan import Replanner
from planner.search.search import PlanWish, choose
from planner.search.unmeasured import unmeasured_plan
from planner.simulation.costs import action_costs
from planner.simulation.predict import predict
from planner.simulation.simulate import simulate

FAMILIES = ("1f1b", "interleaved", "zbv")
LAYERS, RANKS, MICROBATCHES = 48, 8, 32
LOSS_LAYERS, LOSS_RANKS, LOSS_MICROBATCHES = 1_000, 64, 128
MOST_MS = 1_000
"""What a plan after a loss may take."""
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
    wish = PlanWish(ranks=RANKS, schedule=family, microbatches=MICROBATCHES, partition="dynpipe")
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


def plan_after_loss_ms(family: str, replicas: int) -> float:
    """Milliseconds of processor time of a plan for `LOSS_RANKS` - 1 ranks."""
    profile = random_profile(Random(7), LOSS_LAYERS, LOSS_RANKS, memory_bytes=10**15)
    parameters = tuple(layer.parameters for layer in profile.model.layers)
    schedule = build(family, LOSS_RANKS // replicas, LOSS_MICROBATCHES)
    first = replace(unmeasured_plan(schedule, parameters, replicas=replicas), partition="dynpipe")
    replanner = Replanner(first=first, schedule=schedule, parameters=parameters, copies=1, profile=profile)
    domains = [f"node {number}" for number in range(LOSS_RANKS - 1)]
    build_graph.cache_clear()
    return spent_ms(
        lambda: replanner.plan_for(LOSS_RANKS - 1, epoch=0, version=2, reason="", domains=domains)
    )


def show_losses(rounds: int) -> None:
    print(
        f"a plan after a loss, {LOSS_LAYERS:,} layers, from {LOSS_RANKS} ranks to {LOSS_RANKS - 1}, median of {rounds}:"
    )
    for family, replicas in (*((name, 1) for name in families()), ("1f1b", 2)):
        took_ms = median(plan_after_loss_ms(family, replicas) for _ in range(rounds))
        name = family if replicas == 1 else f"{family}, {replicas} replicas"
        print(f"  {name:20} {under(f'{took_ms:,.0f} ms', took_ms, MOST_MS)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--parts", default="search,loss")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if "loss" in parts:
        show_losses(options.rounds)
    if "search" in parts:
        show_searches(options.rounds)


def show_searches(rounds: int) -> None:
    print(
        f"milliseconds of processor time, {LAYERS} layers, {RANKS} ranks, {MICROBATCHES} microbatches, median of"
        f" {REPEATS * rounds} simulations and predictions and of {rounds} searches:"
    )
    print(f"  {'schedule':27} {'simulation':>10} {'prediction':>10} {'search':>10}")
    for family in FAMILIES:
        show(family, rounds)


if __name__ == "__main__":
    main()
