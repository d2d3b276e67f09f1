"""Partition programs against brute force under their own objectives, and their costs against simulation."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from small_profile import layer, profile

from benchmarks.parts.brute_force import all_cuts, merged_s
from benchmarks.parts.optimality import PROGRAMS, deviation, end_to_end_deviation, small_instance
from benchmarks.parts.random_pipelines import random_profile, with_memory
from planner.partition import bottleneck, dynpipe, memory, time
from planner.partition.minmax import smallest_largest
from planner.partition.stage_costs import StageCosts
from planner.plan import PlanError
from planner.profile import Link, Profile
from planner.schedule.registry import build


def costs_of(model: Profile, stages: int, microbatches: int = 4, family: str = "1f1b") -> StageCosts:
    return StageCosts.of(model, build(family, stages, microbatches))


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_program_equals_brute_force(name: str):
    for seed in range(100):
        assert abs(deviation(name, small_instance(Random(seed)))) < 1e-12, seed


def test_algorithm_1_equals_brute_force():
    for seed in range(100):
        assert abs(end_to_end_deviation(Random(seed))) < 1e-12, seed


def test_of_equally_slow_cuts_the_most_even_one_wins():
    # The heavy layer determines the slowest stage; the rest is still balanced.
    model = profile(*(layer(forward_s=cost) for cost in (1.0, 1.0, 1.0, 1.0, 100.0)), ranks=3)
    assert time.partition(costs_of(model, 3)) == ((0, 2), (2, 4), (4, 5))


def test_a_slow_device_gets_fewer_layers():
    model = profile(*[layer()] * 9, ranks=3)
    devices = model.cluster.devices
    slow = replace(
        model,
        cluster=replace(model.cluster, devices=(devices[0], replace(devices[1], slowdown=2.0), devices[2])),
    )
    assert time.partition(costs_of(slow, 3), limited=False) == ((0, 4), (4, 5), (5, 9))


def test_the_first_stages_get_fewer_layers_where_activations_count():
    # Stage s of 1F1B keeps 3 - s microbatches of 100 bytes per layer.
    model = profile(*[layer(parameter_bytes=0, gradient_bytes=0, optimizer_bytes=0)] * 11, ranks=3)
    assert memory.partition(costs_of(model, 3)) == ((0, 2), (2, 5), (5, 11))


def test_the_bottleneck_may_be_a_link():
    # A cut after layer 0 is even, but its message takes 100 s.
    big, small = layer(boundary_bytes=100), layer(boundary_bytes=1)
    model = profile(big, small, small, big, ranks=2, link=Link(latency_s=0.0, bytes_per_s=1.0))
    assert bottleneck.partition(costs_of(model, 2)) in (((0, 2), (2, 4)), ((0, 3), (3, 4)))
    even = profile(small, big, small, layer(), ranks=2, link=Link(latency_s=0.0, bytes_per_s=1.0))
    assert time.partition(costs_of(even, 2)) == ((0, 2), (2, 4))
    assert bottleneck.partition(costs_of(even, 2)) != ((0, 2), (2, 4))


def test_how_long_messages_occupy_ranks_and_links():
    """Three stages of one layer each compute for 7 s per microbatch. The middle one is computed by hand."""
    model = profile(*[layer(boundary_bytes=16, boundary_grad_bytes=8)] * 3, ranks=3)
    down = Link(latency_s=9.0, bytes_per_s=4.0, sender_s=0.5, sender_s_per_byte=0.125, receiver_s=1.0)
    up = Link(latency_s=9.0, bytes_per_s=0.5, sender_s=2.0, receiver_s=4.0, receiver_s_per_byte=0.25)
    links = ((None, down, None), (up, None, down), (None, up, None))
    costs = costs_of(replace(model, cluster=replace(model.cluster, links=links)), 3)
    computing = float(costs.time_s(1)[2, 1])
    assert computing == 7.0
    # It sends 16 bytes to the next stage (0.5 + 2) and receives 8 from it (4 + 2); it receives 16 from the
    # previous stage (1) and sends it 8 (2). Its link up is occupied for 16 s, which is less.
    assert bottleneck.stage_s(costs, 1)[2, 1] == computing + 2.5 + 6.0 + 1.0 + 2.0
    assert bottleneck.stage_s(costs, 0)[1, 0] == computing + 2.5 + 6.0
    # The last stage sends nothing on: there the link is slower than the rank.
    assert bottleneck.stage_s(costs, 2)[3, 2] == 16.0 > computing + 1.0 + 2.0


def test_the_third_case_of_equation_4():
    # p1 = 10, p2 = 1, c = 0: the first stage alone is the bottleneck; the paper's formula says 5.5.
    assert dynpipe.merge(10.0, 1.0, 0.0) == 10.0
    assert dynpipe.merge(4.0, 2.0, 3.0) == 4.5
    assert dynpipe.merge(1.0, 10.0, 2.0) == 10.0


def test_the_iteration_time_of_a_given_cut():
    for seed in range(20):
        model = random_profile(Random(seed), 7, 4)
        for cut in all_cuts(7, 4):
            assert dynpipe.iteration_s(costs_of(model, 4), cut) == pytest.approx(
                merged_s(model, cut, 4), rel=1e-12
            )


@pytest.mark.parametrize("program", [time.partition, bottleneck.partition, dynpipe.partition])
def test_memory_that_no_cut_fits_is_an_error_that_says_how_much_is_lacking(program):
    # Each layer has 150 bytes of state and 100 of activations. Stage 0 keeps two microbatches, stage 1 one.
    model = with_memory(profile(*[layer()] * 4, ranks=2), 699)
    with pytest.raises(
        PlanError, match=r"stage 0 \(layers 0 to 1\) on rank 0 still needs 1 bytes more than the 699"
    ):
        program(costs_of(model, 2))
    roomy = with_memory(model, 750)
    assert program(costs_of(roomy, 2)) == ((0, 2), (2, 4))


def test_stages_of_one_rank_share_its_memory_equally():
    model = profile(*[layer()] * 4, ranks=2)
    assert costs_of(model, 2, family="zbv").limit_bytes(3) == 5_000
    reserved = replace(costs_of(model, 2), reserved_bytes={0: 4_000})
    assert (reserved.limit_bytes(0), reserved.limit_bytes(1)) == (6_000, 10_000)


@pytest.mark.parametrize(
    "program", [memory.partition, time.partition, bottleneck.partition, dynpipe.partition]
)
def test_more_stages_than_layers_are_refused_by_every_program(program):
    with pytest.raises(ValueError, match=r"cannot cut 2 layers into 3 stages .* use at most 2 stages"):
        program(costs_of(profile(layer(), layer(), ranks=3), 3))


def test_smallest_largest_returns_none_if_no_cut_is_allowed():
    assert smallest_largest(3, 2, lambda stage, at: np.full((4, 4), np.inf)[at]) is None
