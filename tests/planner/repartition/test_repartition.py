"""The plan that is found is about as fast as the fastest of all, and its search keeps what it must keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import small_profile
from small_pipelines import Pipeline, pipeline

from benchmarks.parts.brute_force import all_cuts
from planner.plan import Plan, PlanError
from planner.profile import Profile
from planner.repartition.repartition import FoundPlan, best
from planner.repartition.slowdowns import PlaceLoad
from planner.schedule.expand import schedule_of
from planner.schedule.validate import validate
from planner.search import recut
from planner.search.replan import Replanner
from planner.simulation.predict import predict

CLOSE = 1.02


def found_for(job: Pipeline, *, reorder: bool = True) -> FoundPlan:
    return best(job.replanner, job.now, job.domains, job.slowdowns, reorder=reorder)


FAMILIES = (0, 1, 2, 4, 5, 7, 9, 12, 13, 19)
"""Seeds of pipelines of each schedule family, with one and two pipelines, copies and recomputed layers."""


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=[] if seed in FAMILIES else [pytest.mark.soak]) for seed in range(24)],
)
def test_within_two_percent_of_all_cuts_in_all_orders(seed: int) -> None:
    job = pipeline(seed)
    found = found_for(job)
    problem, candidates = job.problem, job.candidates()
    plans = [
        job.replanner.with_standbys(problem.plan(cut, order.tolist(), ""), job.domains)
        for cut, order in zip(candidates.cuts, candidates.orders, strict=True)
    ]
    assert found.best.step_s <= CLOSE * min(map(job.step_s, plans))
    for choice in found.choices:
        assert choice.fits
        assert choice.step_s == job.step_s(choice.plan)
        assert choice.plan.standbys == job.replanner.with_standbys(choice.plan, job.domains).standbys
        validate(schedule_of(choice.plan))
    assert found.now.step_s == job.step_s(job.now)


@pytest.mark.parametrize("seed", range(24, 36))
def test_in_the_present_order_no_cut_is_much_faster(seed: int) -> None:
    job = pipeline(seed)
    found = found_for(job, reorder=False)
    plans = [
        job.replanner.with_standbys(replace(job.now, layers=cut), job.domains)
        for cut in all_cuts(job.now.layers[-1][1], job.now.stages)
    ]
    assert found.best.step_s <= CLOSE * min(map(job.step_s, plans))
    assert all(choice.plan.stage_ranks == job.now.stage_ranks for choice in found.choices)


@pytest.mark.parametrize("seed", range(3))
def test_the_same_question_has_the_same_answer(seed: int) -> None:
    job = pipeline(seed)
    assert [choice.plan for choice in found_for(job).choices] == [
        choice.plan for choice in found_for(job).choices
    ]


def equal_layers(
    layers: int, ranks: int, *, heavy: dict[int, float] | None = None, memory_bytes: int = 10**9
) -> tuple[Replanner, Plan]:
    device = replace(small_profile.DEVICE, memory_bytes=memory_bytes)
    seconds = [(heavy or {}).get(layer, 1.0) for layer in range(layers)]
    profile = small_profile.profile(
        *(
            small_profile.layer(f"layer{number}", forward_s=own, input_grad_s=own, weight_grad_s=own)
            for number, own in enumerate(seconds)
        ),
        ranks=ranks,
        device=device,
    )
    counts = [layers // ranks + (rank < layers % ranks) for rank in range(ranks)]
    now = small_profile.plan(*counts, microbatches=2 * ranks)
    replanner = Replanner(
        first=now, schedule=schedule_of(now), parameters=(10,) * layers, copies=0, profile=profile
    )
    return replanner, now


@pytest.mark.each_choice
@pytest.mark.parametrize("factor", [1.1, 1.8, 3.2])
@pytest.mark.parametrize("slow", [(0,), (1,), (2,), (3,), (0, 1), (1, 3)])
def test_stragglers_at_every_place_are_relieved(slow: Sequence[int], factor: float) -> None:
    replanner, now = equal_layers(12, 4)
    slowdowns = [factor if place in slow else 1.0 for place in range(4)]
    found = best(replanner, now, "abcd", slowdowns)
    profile = replanner.profile_on("abcd", slowdowns)
    plans = [replace(now, layers=cut) for cut in all_cuts(12, 4)]
    assert found.best.step_s <= CLOSE * min(
        predict(profile, plan, schedule_of(plan)).step_s for plan in plans
    )


def test_a_slow_rank_gives_a_part_that_nobody_can_share_to_another() -> None:
    replanner, now = equal_layers(16, 4, heavy={0: 8.0})
    slowdowns = [3.0, 1.0, 1.0, 1.0]
    kept = best(replanner, now, "abcd", slowdowns, reorder=False).best
    found = best(replanner, now, "abcd", slowdowns)
    assert found.best.step_s < 0.6 * kept.step_s
    assert found.best.plan.stage_ranks[0] != 0
    assert found.best.plan.layers_of_rank(0) != now.layers_of_rank(0)
    assert any(choice.plan.stage_ranks == now.stage_ranks for choice in found.choices), "the cheaper move"
    assert found.best.step_s <= 1.005 * min(choice.step_s for choice in found.choices)


def test_equal_ranks_keep_what_they_have() -> None:
    replanner, now = equal_layers(16, 4)
    found = best(replanner, now, "abcd")
    assert (found.best.plan.layers, found.best.plan.stage_ranks) == (now.layers, now.stage_ranks)


def test_of_plans_that_are_as_fast_the_one_that_moves_least_is_taken() -> None:
    replanner, now = equal_layers(17, 4)
    # One rank has a layer more; which one makes no difference to speak of where many microbatches pass.
    for layers in (now.layers, ((0, 4), (4, 8), (8, 13), (13, 17))):
        present = replace(now, microbatches=256, layers=layers)
        assert best(replanner, present, "abcd").best.plan.layers == layers


def test_a_model_tells_how_slow_a_rank_is_with_the_layers_of_a_candidate() -> None:
    """Place 1 is slow with more than two layers only."""
    replanner, now = equal_layers(16, 4)
    asked: list[PlaceLoad] = []

    def slowdowns(loads: Sequence[PlaceLoad]) -> list[float]:
        asked.extend(loads)
        return [
            1.0 if load.place != 1 or load.layers[0][1] - load.layers[0][0] <= 2 else 4.0 for load in loads
        ]

    found = best(replanner, now, "abcd", slowdowns, reorder=False)
    assert len(asked) == len(set(asked)) == found.predicted, "each load is asked for once"
    first, stop = found.best.plan.layers[1]
    assert stop - first == 2
    slow = [device.slowdown for device in found.best.profile.cluster.devices]
    assert slow == [1.0] * 4
    assert found.now.profile.cluster.devices[1].slowdown == 4.0
    assert found.best.step_s < 0.5 * found.now.step_s


def memory_of(profile: Profile, plan: Plan) -> tuple[int, ...]:
    return predict(profile, plan, schedule_of(plan)).memory.peak_bytes


@pytest.mark.parametrize("seed", range(8))
def test_no_plan_exceeds_the_memory(seed: int) -> None:
    free = pipeline(seed)
    needs = sorted(
        max(
            memory_of(free.profile, free.replanner.with_standbys(replace(free.now, layers=cut), free.domains))
        )
        for cut in all_cuts(free.now.layers[-1][1], free.now.stages)
    )
    job = pipeline(seed, memory_bytes=needs[len(needs) // 4])
    found = found_for(job, reorder=False)
    plans = [
        job.replanner.with_standbys(replace(job.now, layers=cut), job.domains)
        for cut in all_cuts(job.now.layers[-1][1], job.now.stages)
    ]
    assert max(memory_of(job.profile, found.best.plan)) <= needs[len(needs) // 4]
    assert found.best.step_s <= 1.1 * min(map(job.step_s, plans))


def test_where_nothing_fits_the_memory_it_is_said() -> None:
    replanner, now = equal_layers(8, 2, memory_bytes=500)
    with pytest.raises(PlanError, match="place 0 lacks"):
        best(replanner, now, "ab", [1.0, 2.0])


def test_without_a_profile_nothing_is_searched() -> None:
    replanner, now = equal_layers(8, 2)
    with pytest.raises(ValueError, match="without a profile"):
        best(replace(replanner, profile=None), now, "ab", [1.0, 2.0])


def test_a_condensed_search_loses_little() -> None:
    rng = np.random.default_rng(3)
    layers = 300
    heavy = dict(enumerate((rng.exponential(1.0, layers) + 0.2).tolist()))
    replanner, now = equal_layers(layers, 8, heavy=heavy)
    slowdowns = [1.0, 3.2, 1.0, 1.0, 1.0, 1.8, 1.0, 1.0]
    condensed = best(replanner, now, "abcdefgh", slowdowns, reorder=False)
    single = tuple((layer, layer + 1) for layer in range(layers))
    full = best(replanner, now, "abcdefgh", slowdowns, reorder=False, blocks=single)
    assert condensed.blocks < full.blocks / 4
    assert condensed.best.step_s <= 1.01 * full.best.step_s


@pytest.mark.parametrize("seed", [1, 4, 9])
def test_candidates_have_the_backward_passes_that_their_own_cut_needs(seed: int) -> None:
    job = pipeline(seed)
    frozen = job.now.layers[-2][1] - 1
    now = replace(job.now, frozen=frozen)
    replanner = replace(job.replanner, frozen=frozen, released=frozen, first=now, schedule=schedule_of(now))
    job = Pipeline(replanner, now, job.domains, job.slowdowns)
    found = found_for(job)
    assert found.now.step_s == job.step_s(now)
    for choice in found.choices:
        assert choice.plan.frozen == frozen
        schedule = choice.runs[0].window.schedule
        assert schedule.frozen_stages == sum(stop <= frozen for _, stop in choice.plan.layers)
        assert choice.step_s == job.step_s(choice.plan)
    cut, _ = recut.best(replanner, now, job.domains, job.slowdowns)
    assert cut == replace(now, layers=cut.layers, partition=cut.partition)
