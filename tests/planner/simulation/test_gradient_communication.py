"""Gradient communication after the window, between replicas and to standbys, computed by hand."""

from dataclasses import replace

import pytest
from small_profile import layer, plan, profile

from planner.plan import Plan
from planner.profile import Link
from planner.schedule.registry import build
from planner.simulation.gradient_communication import (
    exchanged_s,
    shipped_bytes,
    shipped_s,
    standby_update_s,
)
from planner.simulation.predict import early_gradients_s, predict
from planner.simulation.standby_memory import standby_bytes

LINK = Link(
    latency_s=0.5,
    bytes_per_s=8.0,
    sender_s=0.25,
    sender_s_per_byte=0.0625,
    receiver_s=0.125,
    receiver_s_per_byte=0.03125,
)
SIZES = {"gradient_bytes": 16, "boundary_bytes": 0, "boundary_grad_bytes": 0}
TWO = profile(layer("a", **SIZES), layer("b", **SIZES), link=LINK)
CROSSED = plan(1, 1, standbys=((1,), (0,)))


def test_a_standby_takes_a_layers_state_and_one_gradient():
    assert standby_bytes(TWO, CROSSED) == (40 + 80 + 16, 40 + 80 + 16)
    assert standby_bytes(TWO, plan(1, 1)) == (0, 0)
    assert standby_bytes(TWO, plan(1, 1, standbys=((1,), ()))) == (0, 136)
    assert shipped_bytes(TWO, CROSSED) == 32
    assert standby_update_s(TWO, CROSSED) == (0.5, 0.5)


def test_gradients_are_sent_when_they_are_final_and_taken_in_after_the_own_are_sent():
    # 16 bytes take 1.25 s of the sender, 2 s of the link, 0.5 s of latency and 0.625 s of the receiver.
    assert shipped_s(TWO, CROSSED, (10.0, 10.0), {}) == (10 + 1.25 + 2 + 0.5 + 0.625,) * 2
    # Rank 1 was ready long before rank 0.
    assert shipped_s(TWO, CROSSED, (10.0, 0.0), {}) == (10 + 1.25 + 0.625, 10 + 1.25 + 2 + 0.5 + 0.625)
    # Two messages share a link, so the second waits.
    both = plan(2, standbys=((1,), (1,)), replicas=2)
    assert shipped_s(TWO, both, (0.0, 0.0), {}) == (2.5, 1.25 + 2 + 2 + 0.5 + 0.625)


def test_replicas_gather_and_scatter():
    one = profile(layer("a", **SIZES), link=LINK)
    twice = plan(1, replicas=2)
    # Half of 16 bytes go each way, twice.
    way_s = (0.25 + 8 * 0.0625) + 8 / 8 + 0.5 + (0.125 + 8 * 0.03125)
    assert exchanged_s(one, twice) == (2 * way_s,)
    assert exchanged_s(one, replace(twice, pipelines=1)) == (0,)
    assert exchanged_s(one, plan(1)) == (0,)
    # Each pipeline has two replicas: two gradients go to every sum, and one comes back.
    four = exchanged_s(one, plan(1, replicas=4, pipelines=2))[0]
    brought_s = (0.5 + 16 * 0.0625) + 16 / 8 + 0.5 + (0.25 + 16 * 0.03125)
    assert four == brought_s + way_s


def test_a_link_that_was_not_measured_is_like_one_of_the_first_pipeline():
    two = plan(1, 1, replicas=2, standbys=((3,), ()))
    assert shipped_s(TWO, two, (0.0,) * 4, {}) == (1.25, 0, 0, 1.25 + 2 + 0.5 + 0.625)


def step_s(made: Plan, ranks: int = 2) -> float:
    return predict(TWO, made, build("1f1b", ranks, made.microbatches)).step_s


def test_redundancy_is_part_of_the_step():
    alone = predict(TWO, plan(1, 1), build("1f1b", 2, 2))
    peer = predict(TWO, CROSSED, build("1f1b", 2, 2))
    # Rank 0 is the last to end. Its gradients leave as soon as its only layer's are there, with the window.
    longer_s = 1.25 + 2 + 0.5 + 0.625
    assert peer.step_s == alone.step_s + longer_s
    assert peer.redundancy.bytes_per_step == 32
    assert peer.redundancy.seconds_per_step == longer_s
    assert peer.redundancy.memory_bytes == 136
    assert alone.redundancy.seconds_per_step == alone.redundancy.memory_bytes == 0
    assert peer.simulation == alone.simulation
    grown = [a - b for a, b in zip(peer.memory.peak_bytes, alone.memory.peak_bytes, strict=True)]
    assert grown == [136, 136]
    assert [rank.peak.standbys for rank in peer.memory.ranks] == [136, 136]


def test_updates_of_copies_count_where_a_rank_has_no_time_for_them():
    slow = profile(layer("a", **SIZES), layer("b", **{**SIZES, "update_s": 100.0}), link=LINK)
    schedule = build("1f1b", 2, 2)
    alone, peer = predict(slow, plan(1, 1), schedule), predict(slow, CROSSED, schedule)
    idle_s = alone.simulation.makespan_s - alone.simulation.busy_s[0]
    shipped = 1.25 + 2 + 0.5 + 0.625
    assert peer.redundancy.seconds_per_step == pytest.approx(shipped + 100 - idle_s)


def test_one_pipeline_runs_both_replicas_one_after_the_other():
    both = plan(1, 1, replicas=2, pipelines=1)
    assert (both.windows, both.pipeline_count, both.world_size) == (2, 1, 2)
    prediction = predict(TWO, both, build("1f1b", 2, 2))
    alone = predict(TWO, plan(1, 1), build("1f1b", 2, 2))
    # Rank 0 ends a window of 1F1B last, so windows do not overlap.
    assert prediction.simulation == alone.simulation
    assert alone.windows_s == alone.simulation.makespan_s
    assert prediction.windows_s == 2 * alone.windows_s
    assert prediction.step_s - prediction.windows_s == alone.step_s - alone.windows_s
    # The rank keeps the first replica's gradients until it has the second's.
    grown = [a - b for a, b in zip(prediction.memory.peak_bytes, alone.memory.peak_bytes, strict=True)]
    assert grown == [16, 16]


def test_pipelines_of_their_own_take_as_long_as_one_and_the_exchange():
    apart = plan(1, 1, replicas=2)
    assert step_s(apart) == step_s(plan(1, 1)) + max(exchanged_s(TWO, apart))


@pytest.mark.parametrize("windows", [1, 2, 3, 5])
def test_windows_in_a_row_on_one_rank_add_up(windows: int):
    one = profile(layer(), ranks=1)
    repeated = plan(1, replicas=windows, pipelines=1)
    # F = 1 and B = 6 for two microbatches, then the update.
    assert predict(one, repeated, build("gpipe", 1, 2)).step_s == 14 * windows + 0.5


def test_gradients_leave_while_the_last_pass_goes_on():
    # Rank 0 has three layers, whose backward passes of 2 s each end 4, 2 and 0 s before the window's end.
    three = profile(*(layer(name, **SIZES) for name in "abcd"), link=LINK)
    made = plan(3, 1, standbys=((1,), (1,), (1,), ()))
    schedule = build("1f1b", 2, 2)
    alone = predict(three, replace(made, standbys=()), schedule)
    end_s = alone.simulation.end_s[len(schedule.programs[0]) - 1]
    backward_s = three.model.layers[0].backward_s
    early = early_gradients_s(three, made, alone.simulation, None)
    assert early == {2: end_s - 2 * backward_s, 1: end_s - backward_s, 0: end_s}
    # Each holds its rank for 1.25 s and the link for 2 s; two links between them are one.
    held, link, arrives = 1.25, 2.0, 0.5
    left = []
    for number, final_s in enumerate(sorted(early.values())):
        left.append(max([final_s + held * (number + 1), *left[-1:]]) + link)
    taken = left[0] + arrives
    ready = [end_s, 0.0]
    now = ready[1]
    for gone in left:
        now = max(now, gone + arrives) + 0.625
    assert taken < end_s + held
    assert shipped_s(three, made, ready, early) == (end_s + 3 * held, now)
    assert now < shipped_s(three, made, ready, {})[1]


def test_gradients_wait_for_the_end_where_something_is_still_done_to_them():
    made = plan(1, 1, standbys=((1,), (0,)))
    window = predict(TWO, plan(1, 1), build("1f1b", 2, 2)).simulation
    assert early_gradients_s(TWO, made, window, None)
    assert not early_gradients_s(TWO, made, window, ((0.0,) * 2,) * 2)
    assert not early_gradients_s(TWO, replace(made, replicas=2, pipelines=1), window, None)
    for changed in ({"tied_from": 0}, {"statistics_bytes": 4}):
        other = profile(layer("a", **SIZES), layer("b", **SIZES, **changed), link=LINK)
        assert not early_gradients_s(other, made, window, None)
    half = replace(TWO, model=replace(TWO.model, precision="float16"))
    assert not early_gradients_s(half, made, window, None)


def test_what_arrives_takes_cores_of_a_host_that_computes() -> None:
    devices = tuple(replace(device, kind="cpu", socket_s_per_byte=0.5) for device in TWO.cluster.devices)
    on_host = replace(TWO, cluster=replace(TWO.cluster, devices=devices))
    later_s = [
        here - there
        for here, there in zip(
            shipped_s(on_host, CROSSED, (10.0, 0.0), {}),
            shipped_s(TWO, CROSSED, (10.0, 0.0), {}),
            strict=True,
        )
    ]
    assert later_s == pytest.approx([0.5 * 16] * 2)
