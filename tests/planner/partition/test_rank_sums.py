"""The bottleneck partition where ranks hold several stages, against brute force over all cuts."""

from dataclasses import replace
from random import Random
from time import perf_counter

import pytest
from pace import patient
from small_profile import layer, profile

from benchmarks.parts.brute_force import all_cuts
from benchmarks.parts.random_pipelines import random_profile, with_memory
from planner.ir import Schedule
from planner.partition import bottleneck, rank_sums
from planner.partition.stage_costs import Ranges, StageCosts
from planner.plan import PlanError
from planner.profile import Profile
from planner.schedule.registry import build


def busiest_s(model: Profile, stage_ranks: tuple[int, ...], cut: Ranges) -> float:
    """Busy time of the busiest rank or link for one microbatch, summed by layer and by message."""
    ranks_s = [0.0] * (max(stage_ranks) + 1)
    links_s: dict[tuple[int, int], float] = {}
    for (first, stop), rank in zip(cut, stage_ranks, strict=True):
        for each in model.model.layers[first:stop]:
            ranks_s[rank] += model.cluster.devices[rank].slowdown * (each.forward_s + each.backward_s)
    for stage, (_, stop) in enumerate(cut[:-1]):
        here, there, last = stage_ranks[stage], stage_ranks[stage + 1], model.model.layers[stop - 1]
        if here == there:
            continue
        for source, target, size in (
            (here, there, last.boundary_bytes),
            (there, here, last.boundary_grad_bytes),
        ):
            link = model.cluster.link(source, target)
            ranks_s[source] += link.sender_s + size * link.sender_s_per_byte
            ranks_s[target] += link.receiver_s + size * link.receiver_s_per_byte
            links_s[source, target] = links_s.get((source, target), 0.0) + size / link.bytes_per_s
    return max(*ranks_s, *links_s.values(), 0.0)


def instance(rng: Random) -> tuple[Profile, StageCosts]:
    """Up to 10 layers on up to 3 ranks with 2 or 3 stages each; half the instances have slow links."""
    family, ranks = rng.choice(("interleaved", "zbv")), rng.randint(1, 3)
    chunks = 2 if family == "zbv" else rng.randint(2, 3)
    stages = ranks * chunks
    model = random_profile(rng, rng.randint(stages, 10), ranks)
    if rng.random() < 0.5:
        links = tuple(
            tuple(link and replace(link, bytes_per_s=link.bytes_per_s / 100) for link in row)
            for row in model.cluster.links
        )
        model = replace(model, cluster=replace(model.cluster, links=links))
    return model, StageCosts.of(model, build(family, ranks, 2 * ranks, chunks))


def needed_bytes(costs: StageCosts, cut: Ranges) -> float:
    return max(float(costs.memory_bytes(stage)[stop, first]) for stage, (first, stop) in enumerate(cut))


def test_several_stages_per_rank_equal_brute_force():
    for seed in range(100):
        model, costs = instance(Random(seed))
        best_s = min(busiest_s(model, costs.stage_ranks, cut) for cut in all_cuts(costs.layers, costs.stages))
        cut = bottleneck.partition(costs, limited=False)
        assert busiest_s(model, costs.stage_ranks, cut) == pytest.approx(best_s, rel=1e-9), seed


def test_several_stages_per_rank_equal_brute_force_within_the_memory():
    bound = 0
    for seed in range(50):
        rng = Random(seed)
        model, costs = instance(rng)
        needs = {cut: needed_bytes(costs, cut) for cut in all_cuts(costs.layers, costs.stages)}
        # Each of a rank's stages may use an equal part of its memory.
        chunks = costs.stages // (max(costs.stage_ranks) + 1)
        limit = int(rng.choice(sorted(needs.values())[: len(needs) // 2 + 1])) + 1
        short = with_memory(model, limit * chunks)
        times = {
            cut: busiest_s(model, costs.stage_ranks, cut) for cut, need in needs.items() if need <= limit
        }
        cut = bottleneck.partition(replace(costs, profile=short))
        assert times[cut] == pytest.approx(min(times.values()), rel=1e-9), seed
        bound += len(times) < len(needs)
    assert bound > 10


def test_a_light_stage_makes_up_for_a_heavy_one_on_the_same_rank():
    """2 ranks x 2 chunks: the cut whose slowest stage is fastest gives rank 0 a sum of 10; 7 is possible."""
    layers = (
        layer(forward_s=each, input_grad_s=0.0, weight_grad_s=0.0) for each in (1.0, 1.0, 6.0, 2.0, 4.0)
    )
    costs = StageCosts.of(profile(*layers, ranks=2), build("interleaved", 2, 4))
    by_stage = ((0, 2), (2, 3), (3, 4), (4, 5))
    sums = rank_sums.RankSums(costs, lambda stage: bottleneck.rank_s(costs, stage))
    # Rank 0 holds layers 0, 1 and 3; rank 1 layers 2 and 4.
    assert sums.slowest_s(by_stage) == 10.0
    cut = bottleneck.partition(costs)
    assert cut == ((0, 1), (1, 2), (2, 3), (3, 5))
    assert sums.slowest_s(cut) == 7.0


def test_a_model_with_too_many_cuts_gets_the_cut_with_the_fastest_slowest_stage(
    monkeypatch: pytest.MonkeyPatch,
):
    layers = (
        layer(forward_s=each, input_grad_s=0.0, weight_grad_s=0.0) for each in (1.0, 1.0, 6.0, 2.0, 4.0)
    )
    costs = StageCosts.of(profile(*layers, ranks=2), build("interleaved", 2, 4))
    monkeypatch.setattr(rank_sums, "MOST_CUTS", 3)
    assert bottleneck.partition(costs) == ((0, 2), (2, 3), (3, 4), (4, 5))


@pytest.mark.parametrize(
    ("schedule", "stages"), [(build("interleaved", 2, 4), "4 stages"), (build("1f1b", 1, 4), "1 stage")]
)
def test_memory_that_no_cut_fits_is_refused(schedule: Schedule, stages: str):
    costs = StageCosts.of(with_memory(profile(*[layer()] * 6, ranks=schedule.ranks), 10), schedule)
    with pytest.raises(PlanError, match=f"no cut into {stages} fits the memory"):
        bottleneck.partition(costs)


def test_the_largest_model_that_is_searched_takes_seconds_at_most():
    rng = Random(0)
    costs = StageCosts.of(random_profile(rng, 24, 4), build("interleaved", 4, 8))
    assert rank_sums.searchable(costs)
    begun_s = perf_counter()
    bottleneck.partition(costs, limited=False)
    assert perf_counter() - begun_s < patient(5)
