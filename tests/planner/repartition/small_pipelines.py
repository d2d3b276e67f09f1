"""Random running pipelines of every schedule family, small enough for brute force."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from random import Random

import numpy as np

from benchmarks.parts.brute_force import all_cuts
from benchmarks.parts.random_pipelines import random_profile
from planner.plan import Plan
from planner.profile import Profile
from planner.repartition.problem import Candidates, RepartitionProblem
from planner.repartition.slowdowns import Known
from planner.schedule.expand import schedule_of, without_recompute
from planner.schedule.registry import build, families
from planner.search.replan import Replanner
from planner.search.unmeasured import unmeasured_plan
from planner.simulation.predict import predict


@dataclass(frozen=True)
class Pipeline:
    """A job that trains, and what is known of its ranks."""

    replanner: Replanner
    now: Plan
    domains: tuple[str, ...]
    slowdowns: tuple[float | None, ...]

    @property
    def profile(self) -> Profile:
        return self.replanner.profile_on(self.domains, self.slowdowns)

    @property
    def problem(self) -> RepartitionProblem:
        profile = self.profile
        known = Known(tuple(device.slowdown for device in profile.cluster.devices))
        return RepartitionProblem(profile, self.now, without_recompute(schedule_of(self.now)), known)

    def candidates(self) -> Candidates:
        """Every cut in every order."""
        problem = self.problem
        cuts = [[0, *(stop for _, stop in cut)] for cut in all_cuts(problem.layers, problem.stages)]
        orders = list(permutations(range(problem.ranks)))
        return Candidates(np.tile(np.array(cuts), (len(orders), 1)), np.repeat(orders, len(cuts), axis=0))

    def step_s(self, plan: Plan) -> float:
        """The predicted step, with the plan's own standbys; infinite if it does not fit the memory."""
        prediction = predict(self.profile, plan, schedule_of(plan))
        return prediction.step_s if prediction.fits else float("inf")


def pipeline(seed: int, *, memory_bytes: int | None = None) -> Pipeline:
    """One to two pipelines of 2 to 4 ranks with up to three layers more than stages; about half the ranks are slow."""
    rng = Random(seed)
    family = families()[rng.choice(list(families()))]
    ranks = rng.randint(2, 2 if family.default_chunks > 1 else 4)
    stages = ranks * family.default_chunks
    layers, microbatches = rng.randint(stages + 1, stages + 3), ranks * rng.randint(1, 3)
    pipelines = rng.choice([1, 1, 2])
    profile = random_profile(rng, layers, ranks * pipelines, memory_bytes=memory_bytes or 10**12)
    parameters = tuple(layer.parameters for layer in profile.model.layers)
    recompute = tuple(sorted(rng.sample(range(layers - 1), rng.choice([0, 0, 2]))))
    now = unmeasured_plan(
        build(family.name, ranks, microbatches),
        parameters,
        replicas=pipelines * rng.choice([1, 1, 2]),
        pipelines=pipelines,
        recompute=recompute,
    )
    replanner = Replanner(
        first=now,
        schedule=schedule_of(now),
        parameters=parameters,
        copies=rng.choice([0, 1]),
        profile=profile,
    )
    places = range(now.world_size)
    return Pipeline(
        replanner,
        now,
        tuple(f"node {place}" for place in places),
        tuple(rng.choice([1.0, 1.0, None, 1.8, 3.2]) for _ in places),
    )
