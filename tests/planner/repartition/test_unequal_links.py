"""With unlike links between its ranks, a job's search for another plan sees the links that were measured."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from benchmarks.parts.random_pipelines import random_profile
from benchmarks.parts.unequal_links import loss_of, small_job
from orchestrator.controller.planning.current_replanner import CurrentReplanner
from planner.profile import Cluster, Link, Profile
from planner.repartition.repartition import best
from planner.simulation.resized_cluster import links_differ

MOST_LOSS = 1.02


@pytest.mark.parametrize("seed", range(12))
def test_the_search_is_near_the_best_of_all_cuts_in_all_orders(seed: int) -> None:
    assert loss_of(small_job(seed, most_ranks=5)) <= MOST_LOSS


def test_a_slow_link_is_avoided_by_another_order() -> None:
    """The ranks 0 and 1 are neighbours of each other in the present order, over a link that takes longer than a
    stage; in another order no message takes it."""
    job = small_job(0, most_ranks=5)
    profile = job.profile
    fast, slow = Link(latency_s=1e-5, bytes_per_s=1e10), Link(latency_s=1e-5, bytes_per_s=1e5)
    ranks = len(profile.cluster.devices)
    links = tuple(
        tuple(None if a == b else slow if {a, b} == {0, 1} else fast for b in range(ranks))
        for a in range(ranks)
    )
    profile = replace(profile, cluster=replace(profile.cluster, links=links))
    planning = CurrentReplanner(replace(job.replanner, profile=profile))
    found = best(planning.of(range(ranks)), job.now, job.domains)
    used = {frozenset(pair) for pair in pairwise(found.best.plan.stage_ranks)}
    assert frozenset((0, 1)) not in used
    assert found.best.step_s < 0.8 * found.now.step_s
    # A rank that has come since has typical links.
    later = planning.of([*range(2, ranks), ranks, ranks + 1])
    links = later.profile_on(job.domains).cluster.links
    assert {link for row in links for link in row} == {None, fast}


def test_links_that_are_alike_leave_all_ranks_one_replanner() -> None:
    job = small_job(0, most_ranks=5)
    alike = Link(latency_s=1e-4, bytes_per_s=1e9)
    cluster = Cluster.uniform(job.profile.cluster.devices[0], 4, alike)
    assert not links_differ(cluster)
    profile = Profile(model=job.profile.model, cluster=cluster, key="", source="")
    planning = CurrentReplanner(replace(job.replanner, profile=profile))
    assert planning.of([1, 0, 2]) is planning.replanner
    assert links_differ(random_profile(Random(1), 4, 4).cluster)
