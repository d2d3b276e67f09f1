"""What sums of gradients cost where siblings share them out, computed by hand: time during the window, and memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_profile import layer, plan, profile
from test_gradient_communication import LINK, SIZES

from planner.schedule.registry import build
from planner.simulation.gradient_communication import exchanged_s, folded_s
from planner.simulation.gradient_memory import GradientMemory, gradient_memory
from planner.simulation.predict import predict
from planner.simulation.traffic_cost import SOCKET_S_PER_BYTE

TWO = profile(layer("a", **SIZES), layer("b", **SIZES), link=LINK)


def shared(pipelines: int, *layers: int, replicas: int = 2, shard: str = "gradients"):
    return replace(plan(*layers, replicas=replicas, pipelines=pipelines), shard=shard)


def test_gradients_travel_while_they_are_formed_and_weights_come_back_after_the_update() -> None:
    # Of two layers, half of 16 bytes each go to the sibling and as much comes: 16 bytes in two messages each way.
    held_s = (2 * 0.25 + 16 * 0.0625) + (2 * 0.125 + 16 * 0.03125)
    assert folded_s(TWO, shared(2, 2), [[10.0, 10.0]]) == (held_s,)
    # A layer's travel for 1.5 s, while the one before it is formed, or after the first one the last.
    assert folded_s(TWO, shared(2, 2), [[10.0, 0.5]]) == (held_s + 1.0,)
    assert folded_s(TWO, shared(2, 2), [[1.25, 10.0]]) == (held_s + 0.25,)
    # Of four siblings, a layer's go to three: 12 bytes in 1.5 s, and 0.5 s until they are there.
    held_s = 3 * ((2 * 0.25 + 8 * 0.0625) + (2 * 0.125 + 8 * 0.03125))
    assert folded_s(TWO, shared(4, 2, replicas=4), [[1.75, 10.0]]) == (held_s + 0.25,)
    # Where ranks compute on the host, what leaves and what arrives takes their cores' time beside that.
    devices = tuple(replace(device, kind="cpu") for device in TWO.cluster.devices)
    on_host = replace(TWO, cluster=replace(TWO.cluster, devices=devices))
    carried_s = 3 * 2 * 8 * SOCKET_S_PER_BYTE
    found = folded_s(on_host, shared(4, 2, replicas=4), [[1.75, 10.0]])
    assert found == pytest.approx((held_s + 0.25 + carried_s,), rel=1e-12)
    one_way_s = (2 * 0.25 + 16 * 0.0625) + 16 / 8 + 0.5 + (2 * 0.125 + 16 * 0.03125)
    assert exchanged_s(TWO, shared(2, 2)) == (one_way_s,)
    assert exchanged_s(TWO, shared(2, 2, shard="optimizer")) == (2 * one_way_s,)
    assert folded_s(TWO, shared(2, 2, shard="optimizer"), [[0.5, 0.5]]) == (0.0,)
    assert folded_s(TWO, shared(1, 2), [[0.5, 0.5]]) == (0.0,)


def test_the_step_has_that_for_each_microbatch() -> None:
    schedule = build("1f1b", 1, 4)
    optimizer, gradients = (
        predict(TWO, replace(shared(2, 2, shard=shard), microbatches=4), schedule)
        for shard in ("optimizer", "gradients")
    )
    backward_s = [each.backward_s for each in TWO.model.layers]
    assert gradients.windows_s - optimizer.windows_s == pytest.approx(
        4 * folded_s(TWO, gradients.plan, [backward_s])[0]
    )
    outside_s = [each.step_s - each.windows_s for each in (optimizer, gradients)]
    one_way_s = exchanged_s(TWO, gradients.plan)[0]
    assert outside_s[0] - outside_s[1] == pytest.approx(one_way_s)


def test_a_rank_keeps_its_shards_sums_and_what_is_under_way() -> None:
    # Between two siblings: the own gradients of a layer, whole, and the sibling's of the shard.
    sent = 16 + 8
    found = gradient_memory(TWO, shared(2, 2), 0, 0)
    assert found == GradientMemory(summed=(8, 8), under_way=sent, forming=(16, 16))
    # Of four, three send theirs.
    found = gradient_memory(TWO, shared(4, 2, replicas=4), 0, 0)
    assert found == GradientMemory(summed=(4, 4), under_way=16 + 3 * 4, forming=(16, 16))
    # One pipeline has the whole sums, and a microbatch's gradients of one layer until they are added.
    found = gradient_memory(TWO, shared(1, 2), 0, 0)
    assert found == GradientMemory(summed=(16, 16), under_way=0, forming=(16, 16))
    assert gradient_memory(TWO, shared(2, 2, shard="optimizer"), 0, 0) == GradientMemory(summed=(16, 16))


def test_unlike_layers_count_with_the_one_formed_before() -> None:
    layers = (layer("a", **{**SIZES, "gradient_bytes": 4}), layer("b", **SIZES), layer("c", **SIZES))
    found = gradient_memory(profile(*layers, link=LINK), shared(2, 3), 0, 0)
    assert found == GradientMemory(summed=(2, 8, 8), under_way=6, forming=(24 - 6 + 4, 24 - 6 + 16, 16))


def test_the_saving_shows_in_the_prediction() -> None:
    """Half of the sums, less what is under way: of few layers that is more."""
    many = profile(*[layer(str(n), **{**SIZES, "gradient_bytes": 1600}) for n in range(20)], link=LINK)
    schedule = build("1f1b", 1, 2)
    peaks = {
        shard: predict(many, shared(2, 20, shard=shard), schedule).peak_memory_bytes
        for shard in ("none", "optimizer", "gradients")
    }
    assert peaks["none"] > peaks["optimizer"]
    assert peaks["optimizer"] - peaks["gradients"] == 20 * 800 - (1600 + 1600 + 800)
