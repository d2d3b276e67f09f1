"""Small pipelines whose ranks have unlike links, and how near the search for another plan comes to the best of all."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from random import Random

import numpy as np

from benchmarks.parts.brute_force import all_cuts
from benchmarks.parts.random_pipelines import random_profile
from orchestrator.controller.planning.current_replanner import CurrentReplanner
from planner.plan import Plan
from planner.profile import Profile
from planner.repartition.judge import Judge
from planner.repartition.problem import Candidates, Order, RepartitionProblem
from planner.repartition.repartition import best
from planner.repartition.slowdowns import Known
from planner.schedule.expand import schedule_of
from planner.schedule.registry import build, families
from planner.search.replan import Replanner
from planner.search.unmeasured import unmeasured_plan


@dataclass(frozen=True)
class SmallJob:
    """A job that trains on ranks 0, 1, ..., each on a node of its own, without copies."""

    profile: Profile
    replanner: Replanner
    now: Plan
    slowdowns: tuple[float, ...]

    @property
    def domains(self) -> tuple[str, ...]:
        return tuple(f"node {rank}" for rank in range(self.now.world_size))


def small_job(seed: int, *, most_ranks: int = 6) -> SmallJob:
    """Any schedule family on 2 to `most_ranks` ranks, with up to four layers more than stages; about half the ranks are
    slow. Messages take anything from almost no time to a layer's."""
    rng = Random(seed)
    family = families()[rng.choice(list(families()))]
    two = family.default_chunks > 1
    ranks = rng.randint(2, 3) if two else rng.randint(3, most_ranks)
    stages = ranks * family.default_chunks
    layers, microbatches = rng.randint(stages + 1, stages + 4), ranks * rng.randint(1, 3)
    profile = random_profile(rng, layers, ranks)
    parameters = tuple(layer.parameters for layer in profile.model.layers)
    now = unmeasured_plan(build(family.name, ranks, microbatches), parameters, replicas=1)
    replanner = Replanner(
        first=now, schedule=schedule_of(now), parameters=parameters, copies=0, profile=profile
    )
    slowdowns = tuple(rng.choice([1.0, 1.0, 1.8, 3.2]) for _ in range(ranks))
    return SmallJob(profile, replanner, now, slowdowns)


def loss_of(job: SmallJob) -> float:
    """The step of the plan that a controller's replanner finds, with the measured links, over the least of all cuts in
    all orders."""
    ranks = range(job.now.world_size)
    found = best(CurrentReplanner(job.replanner).of(ranks), job.now, job.domains, job.slowdowns)
    on = job.replanner.profile_on(job.domains, job.slowdowns).cluster
    slow = tuple(device.slowdown for device in on.devices)
    problem = RepartitionProblem(job.profile, job.now, schedule_of(job.now), Known(slow))
    judge = Judge(problem)
    cuts = np.array([[0, *(stop for _, stop in cut)] for cut in all_cuts(problem.layers, problem.stages)])
    least_s = min(
        float(judge.step_s(Candidates.one_order(cuts, order)).min()) for order in permutations(ranks)
    )
    taken = found.best.plan
    cut = np.array([[0, *(stop for _, stop in taken.layers)]])
    return float(judge.step_s(Candidates.one_order(cut, _order(problem, taken)))[0]) / least_s


def _order(problem: RepartitionProblem, plan: Plan) -> Order:
    places = dict(zip(problem.stage_ranks, plan.stage_ranks, strict=True))
    return tuple(places[rank] for rank in range(problem.ranks))
