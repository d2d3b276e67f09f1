"""Another plan for ranks that have become slow: how long the search takes, and how near it comes to the best.

    python -m benchmarks.repartition [--rounds N] [--layers N] [--ranks N] [--microbatches N] [--instances N]
                                     [--unequal N]

First random layers on many ranks, two of which are slow: the search over the condensed model beside the search over
all layers, in the present order of the ranks and in others, and the whole decision: the search, and what a move is
worth. Then random pipelines of 2 to 4 ranks, of every schedule family, beside every cut in every order; and others of
2 to 6 ranks with unlike links, as a controller's planner sees them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean, median
from time import perf_counter
from typing import TypeVar

from benchmarks.parts import unequal_links
from benchmarks.parts.random_pipelines import random_profile
from benchmarks.parts.targets import at_most, under
from planner.adapt.policy import MoveDecision, SpeedForecast, decide
from planner.plan import Plan
from planner.repartition.repartition import FoundPlan, best
from planner.schedule.expand import schedule_of
from planner.schedule.registry import build
from planner.search.replan import Replanner
from planner.search.unmeasured import unmeasured_plan

# The random pipelines are those of the tests.
sys.path.append(str(Path(__file__).parents[1] / "tests" / "planner" / "repartition"))

from small_pipelines import Pipeline, pipeline

SLOWDOWNS = (3.2, 1.8)
MOST_S = 1.0
MOST_LOSS = 1.02

T = TypeVar("T")


def large(layers: int, ranks: int, microbatches: int) -> tuple[Replanner, Plan]:
    """A pipeline of random layers."""
    profile = random_profile(Random(7), layers, ranks, memory_bytes=10**15)
    parameters = tuple(layer.parameters for layer in profile.model.layers)
    now = unmeasured_plan(build("1f1b", ranks, microbatches), parameters, replicas=1)
    now = replace(now, partition="dynpipe")
    return Replanner(
        first=now, schedule=schedule_of(now), parameters=parameters, copies=0, profile=profile
    ), now


def timed(search: Callable[[], T], rounds: int) -> tuple[float, T]:
    """Median seconds of a search, and what it found."""
    took_s = []
    for _ in range(rounds):
        begun_s = perf_counter()
        found = search()
        took_s.append(perf_counter() - begun_s)
    return median(took_s), found


def show_large(given: argparse.Namespace) -> None:
    replanner, now = large(given.layers, given.ranks, given.microbatches)
    domains = [f"node {place}" for place in range(given.ranks)]
    slowdowns = [1.0] * given.ranks
    for place, factor in zip((given.ranks // 3, 2 * given.ranks // 3), SLOWDOWNS, strict=True):
        slowdowns[place] = factor
    # Balanced for equal ranks, as a job is before two of them become slow.
    now = best(replanner, now, domains, reorder=False).best.plan
    single = tuple((layer, layer + 1) for layer in range(given.layers))
    print(
        f"{given.layers:,} layers, {given.ranks} ranks, {given.microbatches} microbatches, slow by {SLOWDOWNS}:"
    )
    for name, reorder in (("in the present order", False), ("in any order", True)):

        def condensed(reorder: bool = reorder) -> FoundPlan:
            return best(replanner, now, domains, slowdowns, reorder=reorder)

        def full(reorder: bool = reorder) -> FoundPlan:
            return best(replanner, now, domains, slowdowns, reorder=reorder, blocks=single)

        took_s, found = timed(condensed, given.rounds)
        full_s, whole = timed(full, given.rounds)
        print(f"  {name}: {under(f'{took_s:.2f} s', took_s, MOST_S)}; {found.effort}")
        print(
            f"    step {found.now.step_s:.3f} -> {found.best.step_s:.3f} s; with all {whole.blocks:,} layers the"
            f" search takes {full_s:.2f} s and the step {whole.best.step_s / found.best.step_s:.4f} of that",
            flush=True,
        )

    def decision() -> MoveDecision:
        forecast = SpeedForecast(remaining_steps=1000, lasting_steps=100, before=[1.0] * given.ranks)
        return decide(replanner, now, domains, slowdowns, forecast)

    took_s, decided = timed(decision, given.rounds)
    print(f"  a decision: {under(f'{took_s:.2f} s', took_s, MOST_S)}; {decided.reason}", flush=True)


def loss_of(job: Pipeline) -> float:
    """The step that the search finds over the least of all cuts in all orders."""
    found = best(job.replanner, job.now, job.domains, job.slowdowns)
    problem, candidates = job.problem, job.candidates()
    least_s = min(
        job.step_s(job.replanner.with_standbys(problem.plan(cut, order.tolist(), ""), job.domains))
        for cut, order in zip(candidates.cuts, candidates.orders, strict=True)
    )
    return found.best.step_s / least_s


def show_small(instances: int) -> None:
    losses = sorted(loss_of(pipeline(1000 + seed)) for seed in range(instances))
    exact = sum(loss <= 1 + 1e-9 for loss in losses)
    worst = at_most(f"worst {losses[-1]:.4f}", losses[-1], MOST_LOSS)
    print(f"{instances} small pipelines, step over the best of all: {exact} exact, {worst}")


def show_unequal(instances: int) -> None:
    losses = sorted(unequal_links.loss_of(unequal_links.small_job(seed)) for seed in range(instances))
    worst = at_most(f"worst {losses[-1]:.4f}", losses[-1], MOST_LOSS)
    print(
        f"{instances} small pipelines with unlike links, step over the best of all: mean {fmean(losses):.4f}, {worst}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=128)
    parser.add_argument("--instances", type=int, default=100)
    parser.add_argument("--unequal", type=int, default=200)
    given = parser.parse_args()
    show_large(given)
    show_small(given.instances)
    show_unequal(given.unequal)


if __name__ == "__main__":
    main()
