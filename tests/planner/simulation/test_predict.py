"""The predicted step."""

from dataclasses import replace

import pytest
from small_profile import DEVICE, layer, plan, profile

from planner.profile import Link
from planner.schedule.registry import build
from planner.simulation.predict import predict


def test_a_step_is_its_makespan_the_longest_update_and_the_commit():
    two = profile(layer(update_s=0.25), layer(update_s=0.5), commit_s=0.125)
    prediction = predict(two, plan(1, 1), build("1f1b", 2, 2))
    # F = 1 and B = 6 on both ranks: (M + P - 1)(F + B).
    assert prediction.simulation.makespan_s == 21
    assert prediction.step_s == 21 + 0.5 + 0.125
    assert prediction.bubble == 1 / 3


def test_links_and_ratios_are_in_it():
    link = Link(latency_s=0.5, bytes_per_s=8.0)
    two = profile(layer(), layer(), link=link)
    alone = plan(1, 1, microbatches=1)
    # Four bytes go forward, two back.
    assert predict(two, alone, build("1f1b", 2, 1)).simulation.makespan_s == 14 + 2 * 0.5 + 6 / 8
    frozen = predict(two, alone, build("1f1b", 2, 1), ((0.5,), (1.0,)))
    assert frozen.simulation.makespan_s == 1 + 1 + 2 + (2 + 2) + 2 * 0.5 + 6 / 8
    assert [rank.peak.gradients for rank in frozen.memory.ranks] == [30, 0]


def test_the_excess_is_given_per_rank():
    # Rank 0 keeps two microbatches: 40 + 80 + 30 + 200 and a gradient of 2. Rank 1 keeps one and its input.
    small = (replace(DEVICE, memory_bytes=340), replace(DEVICE, memory_bytes=258))
    two = profile(layer(), layer())
    tight = replace(two, cluster=replace(two.cluster, devices=small))
    prediction = predict(tight, plan(1, 1), build("1f1b", 2, 2))
    assert prediction.memory.peak_bytes == (352, 258)
    assert prediction.excess_bytes == (12, 0)
    assert not prediction.fits
    assert prediction.peak_memory_bytes == 352
    assert predict(two, plan(1, 1), build("1f1b", 2, 2)).fits


def test_a_plan_for_more_devices_than_there_are_is_refused():
    with pytest.raises(ValueError, match="3 pipeline ranks, the profile 2 devices"):
        predict(profile(*[layer()] * 3), plan(1, 1, 1), build("1f1b", 3, 2))


def test_a_large_step_is_predicted():
    """1,024 layers on 256 ranks, 128 microbatches: 65,536 actions."""
    prediction = predict(
        profile(*[layer()] * 1024, ranks=256), plan(*[4] * 256, microbatches=128), build("1f1b", 256, 128)
    )
    assert prediction.simulation.makespan_s == pytest.approx(4 * 7 * (128 + 256 - 1), abs=1e-9)
    assert prediction.memory.ranks[0].peak.activations == 128 * 400
    assert prediction.memory.ranks[255].peak.activations == 400 + 8
