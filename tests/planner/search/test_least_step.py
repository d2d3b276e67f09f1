"""No cut of a shape undercuts the bound that rules shapes out before anything is simulated."""

from __future__ import annotations

from random import Random

import pytest

from benchmarks.parts.brute_force import all_cuts
from benchmarks.parts.random_pipelines import random_profile
from planner.search.candidate import Candidate
from planner.search.evaluate import Evaluator
from planner.search.shapes import PipelineShape
from planner.simulation.costs import memory_limits
from planner.simulation.memory import most_bytes
from planner.simulation.resized_cluster import resized


def evaluator_of(seed: int, *names: str, copies: bool = False) -> Evaluator:
    rng = Random(seed)
    ranks, microbatches, replicas = rng.randint(1, 4), rng.randint(1, 9), rng.choice([1, 1, 2, 3])
    pipelines, layers = rng.choice([1, replicas]), rng.randint(ranks, ranks + 3)
    again = rng.sample(range(layers - 1), min(layers - 1, rng.choice([0, 0, 2])))
    places = ranks * pipelines
    return Evaluator(
        random_profile(rng, layers, places, memory_bytes=rng.choice([10**12, 20_000_000])),
        PipelineShape(name=rng.choice(names), ranks=ranks, chunks=1, microbatches=microbatches),
        replicas=replicas,
        recompute=tuple(sorted(again)),
        pipelines=pipelines,
        domains=[f"node {place}" for place in range(places)] if copies else None,
    )


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_no_cut_takes_less_than_the_bound(name: str) -> None:
    ruled_out = 0
    for seed in range(40):
        evaluator = evaluator_of(seed, name)
        cuts = list(all_cuts(evaluator.layers, evaluator.shape.ranks))
        least = min(evaluator.bare_s(cut) for cut in cuts) / evaluator.shape.microbatches
        assert evaluator.can_be_within(least)
        ruled_out += not evaluator.can_be_within(0.8 * least)
    assert ruled_out > 12


@pytest.mark.parametrize(("fewer", "percent"), [(60, 1), (48, 10), (32, 40)])
def test_the_bound_is_near_what_a_balanced_pipeline_takes(fewer: int, percent: int) -> None:
    """1F1B takes M + P - 1 turns: with few ranks fewer there is little less work, and more for each."""
    profile = random_profile(Random(7), 300, 2)
    step_s = {}
    for ranks in (64, fewer):
        on = resized(profile.cluster, list(range(ranks)))
        shape = PipelineShape(name="1f1b", ranks=ranks, chunks=1, microbatches=128)
        evaluator = Evaluator(
            type(profile)(model=profile.model, cluster=on, key="", source=""),
            shape,
            replicas=1,
            recompute=(),
        )
        compute_s = sum(layer.forward_s + layer.backward_s for layer in profile.model.layers)
        step_s[ranks] = compute_s * (128 + ranks - 1) / ranks / 128
        assert not evaluator.can_be_within(step_s[ranks] * 0.95)
    assert step_s[fewer] > step_s[64] * (1 + percent / 100)


@pytest.mark.parametrize("copies", [False, True])
def test_the_first_candidate_is_the_one_with_the_least_order(copies: bool) -> None:
    for seed in range(12):
        evaluator = evaluator_of(seed, "gpipe", "1f1b", "zb-h1", copies=copies)
        cuts = list(all_cuts(evaluator.layers, evaluator.shape.ranks))
        first = Candidate.first(Candidate(evaluator, "", cut) for cut in cuts)
        assert first is not None
        least = min((sum(evaluator.predict(cut).excess_bytes), evaluator.predict(cut).step_s) for cut in cuts)
        assert (sum(first.prediction.excess_bytes), first.prediction.step_s) == least


def test_no_rank_takes_more_than_all_that_it_ever_holds() -> None:
    for seed in range(12):
        evaluator = evaluator_of(seed, "gpipe", "1f1b", "zb-h1", copies=True)
        for cut in list(all_cuts(evaluator.layers, evaluator.shape.ranks))[:10]:
            found = evaluator.predict(cut)
            plan, schedule = found.plan, evaluator.schedule(cut)
            counts = evaluator._costs.in_flight
            most = most_bytes(found.profile, plan, schedule, counts)
            assert all(a <= b for a, b in zip(found.memory.peak_bytes, most, strict=True))
            limits = memory_limits(found.profile.cluster, plan.pipeline_ranks, plan.pipeline_count)
            assert len(limits) == len(most)
