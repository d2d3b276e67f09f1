"""DynPipe's Algorithm 1 beyond the comparison with brute force: T(S), memory limits, impossible requests."""

from dataclasses import replace
from itertools import product
from random import Random

import pytest
from small_profile import DEVICE, layer, profile

from benchmarks.parts.brute_force import all_pipelines, iteration_s
from benchmarks.parts.random_pipelines import random_profile, with_memory
from planner.plan import PlanError
from planner.profile import Link
from planner.search import end_to_end
from planner.search.convergence import ConvergenceError
from planner.search.end_to_end import SharedStage


def test_two_devices_halve_a_stage_and_pay_for_the_all_reduce():
    # 2 layers of 7 s. One stage on both devices takes 14 / 2 s and 2 messages of half of 60 bytes at 30
    # bytes/s.
    model = profile(layer(), layer(), ranks=2, link=Link(latency_s=0.25, bytes_per_s=30.0))
    one, two = end_to_end.plan(model, lambda stages: 1.0, microbatches=1)
    assert one.stages == (SharedStage(first=0, stop=2, device=0, devices=2),)
    assert one.iteration_s == 7 + 2 * (1 + 0.25)
    # Two stages send 6 bytes over the cut.
    assert two.iteration_s == (7 + 7 + 6 / 30) / 2
    amortised = end_to_end.plan(model, lambda stages: 1.0, microbatches=4)
    assert amortised[0].iteration_s == 7 + 2 * (1 + 0.25) / 4


def test_a_stage_stays_within_one_machine():
    model = profile(layer(), layer(), ranks=3)
    devices = tuple(replace(DEVICE, machine=machine) for machine in "abb")
    apart = replace(model, cluster=replace(model.cluster, devices=devices))
    (only,) = end_to_end.plan(apart, lambda stages: 1.0, microbatches=4)
    assert [(stage.device, stage.devices) for stage in only.stages] == [(0, 1), (1, 2)]


def test_updates_that_grow_with_the_stages_favour_fewer_of_them():
    model = profile(*[layer()] * 8, ranks=8)

    def stages(updates) -> int:
        found = end_to_end.plan(model, updates, microbatches=8)
        return len(min(found, key=lambda each: each.wall_clock_s).stages)

    # With free links and a negligible all-reduce, every number of stages takes 7 s.
    assert stages(lambda count: 100 + count) == 1
    assert stages(lambda count: 100 - count) == 8


def test_stages_that_never_converge_are_left_out():
    model = profile(*[layer()] * 4, ranks=4)

    def updates(stages: int) -> float:
        if stages > 2:
            raise ConvergenceError("out of reach")
        return 10.0

    assert [len(each.stages) for each in end_to_end.plan(model, updates, microbatches=4)] == [1, 2]

    def never(stages: int) -> float:
        raise ConvergenceError(f"out of reach with {stages}")

    with pytest.raises(ConvergenceError, match="out of reach with 1"):
        end_to_end.plan(model, never, microbatches=4)


def test_memory_limits_hold_and_the_answer_is_still_the_best():
    for seed in range(30):
        rng = Random(seed)
        devices, layers, microbatches = rng.randint(2, 4), rng.randint(4, 6), rng.randint(1, 6)
        model = random_profile(rng, layers, devices)

        def needs(pipeline, model=model, microbatches=microbatches) -> float:
            """Bytes of the fullest stage: its entire state, and a share of its activations."""
            most = 0.0
            for index, stage in enumerate(pipeline):
                own = model.model.layers[stage.first : stage.stop]
                kept = sum(each.activation_bytes for each in own) + (own[0].input_bytes if index else 0)
                state = sum(each.parameter_bytes + each.gradient_bytes + each.optimizer_bytes for each in own)
                most = max(most, state + min(microbatches, len(pipeline) - index) * kept / stage.devices)
            return most

        pipelines = [
            pipeline for stages in range(1, layers + 1) for pipeline in all_pipelines(model, stages, (1, 2))
        ]
        limit = sorted(map(needs, pipelines))[len(pipelines) // 4]
        found = end_to_end.plan(
            with_memory(model, int(limit) + 1), lambda stages: 1.0, microbatches=microbatches, sizes=(1, 2)
        )
        assert all(needs(each.stages) <= limit + 1 for each in found)
        for each, stages in product(found, range(1, layers + 1)):
            if len(each.stages) == stages:
                best = min(
                    iteration_s(model, pipeline, microbatches)
                    for pipeline in pipelines
                    if len(pipeline) == stages and needs(pipeline) <= limit + 1
                )
                assert each.iteration_s == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize(("microbatches", "needed"), [(1, 150 + 3 * 100 + 2 * 40), (2, 150 + 3 * 100 + 40)])
def test_an_asynchronous_pipeline_stashes_weights(microbatches: int, needed: int):
    """The first of three stages keeps three microbatches of 100 bytes, and every version of its 40 bytes of
    weights that they have seen: three versions with one microbatch per update, two with two."""

    def stages(limit: int, *, synchronous: bool) -> int:
        model = with_memory(profile(*[layer()] * 3, ranks=3), limit)
        (found,) = end_to_end.plan(
            model, lambda stages: 1.0, microbatches=microbatches, synchronous=synchronous, sizes=(1,)
        )
        return len(found.stages)

    assert stages(needed, synchronous=False) == stages(needed - 1, synchronous=True) == 3
    with pytest.raises(PlanError, match="no pipeline over 3 devices fits their memory"):
        stages(needed - 1, synchronous=False)


def test_updates_of_any_pipeline_take_as_many_microbatches():
    model = profile(*[layer()] * 4, ranks=2)
    for synchronous in (True, False):
        for each in end_to_end.plan(model, lambda stages: 3.0, microbatches=4, synchronous=synchronous):
            assert each.wall_clock_s == 3 * 4 * each.iteration_s


def test_what_cannot_be_says_why():
    model = profile(layer(), ranks=3)
    with pytest.raises(
        PlanError, match="3 devices cannot all be used by 1 layer, with 2 devices per stage at most"
    ):
        end_to_end.plan(model, lambda stages: 1.0, microbatches=4, sizes=(1, 2))
    small = with_memory(profile(*[layer()] * 4, ranks=4), 100)
    with pytest.raises(PlanError, match="no pipeline over 4 devices fits their memory"):
        end_to_end.plan(small, lambda stages: 1.0, microbatches=4)
