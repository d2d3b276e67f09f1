"""What snapshots cost a step, and how much a lost rank undoes, computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_profile import layer, plan, profile

from planner.plan import Plan, undone_steps
from planner.profile import Link, Profile
from planner.schedule.registry import build
from planner.simulation.memory import memory
from planner.simulation.predict import predict
from planner.simulation.snapshot_cost import (
    COPIED_BYTES_PER_S,
    DISTURBANCE,
    cost_of_snapshots,
    snapshot_bytes_of_places,
)
from planner.simulation.traffic_cost import STREAM_S_PER_BYTE

LINK = Link(latency_s=0.5, bytes_per_s=8.0, sender_s=0.25, receiver_s=0.125)
SIZES = {"gradient_bytes": 16, "boundary_bytes": 0, "boundary_grad_bytes": 0}
TWO = profile(layer("a", **SIZES), layer("b", **SIZES), link=LINK)
STATE = 40 + 80
"""Bytes of a layer's weights and optimizer state."""


def crossed(every: int) -> Plan:
    return replace(plan(1, 1), snapshots=((1,), (0,)), snapshot_every=every)


def on(kind: str) -> Profile:
    devices = tuple(replace(device, kind=kind) for device in TWO.cluster.devices)
    return replace(TWO, cluster=replace(TWO.cluster, devices=devices))


TRAVELS_S = 0.25 + STATE / 8 + 0.5 + 0.125
"""A state over the link, from the send to the end of the receive."""


def test_states_are_sent_once_in_so_many_steps() -> None:
    cost = cost_of_snapshots(on("cuda"), crossed(4), step_s=100.0)
    assert cost.bytes_per_step == 2 * STATE / 4
    # A GPU computes on while its host copies and sends; messages of training meet states on the link.
    assert cost.seconds_per_step == pytest.approx(DISTURBANCE * TRAVELS_S / 4)


def test_ranks_that_compute_on_the_host_have_less_of_it() -> None:
    cost = cost_of_snapshots(on("cpu"), crossed(4), step_s=100.0)
    host_s = STATE / COPIED_BYTES_PER_S + 2 * STATE * STREAM_S_PER_BYTE
    more_s = cost.seconds_per_step - cost_of_snapshots(on("cuda"), crossed(4), step_s=100.0).seconds_per_step
    assert more_s == pytest.approx(host_s / 4, rel=1e-6)


def test_what_the_profile_says_of_streams_counts() -> None:
    host = on("cpu")
    devices = tuple(replace(device, stream_s_per_byte=0.25) for device in host.cluster.devices)
    measured = replace(host, cluster=replace(host.cluster, devices=devices))
    cost = cost_of_snapshots(measured, crossed(4), step_s=100.0)
    host_s = STATE / COPIED_BYTES_PER_S + 2 * STATE * 0.25
    assert cost.seconds_per_step == pytest.approx((DISTURBANCE * TRAVELS_S + host_s) / 4)


def test_an_update_waits_until_layers_are_copied() -> None:
    copying_s = STATE / COPIED_BYTES_PER_S
    cost = cost_of_snapshots(on("cuda"), crossed(4), step_s=copying_s / 3)
    assert cost.seconds_per_step == pytest.approx((DISTURBANCE * TRAVELS_S + copying_s * 2 / 3) / 4)


def test_two_snapshots_are_kept_of_what_a_place_owns_and_of_what_it_fetches() -> None:
    assert snapshot_bytes_of_places(TWO, crossed(4)) == (4 * STATE, 4 * STATE)
    assert snapshot_bytes_of_places(TWO, plan(1, 1)) == (0, 0)


@pytest.mark.parametrize(
    ("every", "steps", "undone"),
    [
        # Begun at 4, complete at 6; the one before is of step 0.
        (4, 2, 5),
        (4, 4, 7),
        # Begun at 4, complete at 9, where the next begins, which is complete at 14: it is lost at 13.
        (4, 5, 9),
        (1, 1, 1),
    ],
)
def test_a_rank_is_lost_just_before_the_next_snapshot_is_complete(
    every: int, steps: int, undone: int
) -> None:
    assert undone_steps(every, steps) == undone


def test_a_slow_link_keeps_snapshots_from_becoming_complete() -> None:
    # 15 s on the link, and 0.875 s around it.
    fast = cost_of_snapshots(TWO, crossed(4), step_s=100.0)
    slow = cost_of_snapshots(TWO, crossed(4), step_s=4.0)
    assert fast.undone_steps == undone_steps(4, 1 + 1)
    assert slow.undone_steps == undone_steps(4, 4 + 1)


def test_the_prediction_has_them() -> None:
    schedule = build("1f1b", 2, 4)
    bare = predict(TWO, plan(1, 1), schedule)
    kept = predict(TWO, crossed(2), schedule)
    assert bare.redundancy.undone_steps == 0
    assert kept.redundancy.bytes_per_step == STATE
    assert kept.step_s == pytest.approx(bare.step_s + kept.redundancy.seconds_per_step)
    assert kept.redundancy.memory_bytes == 4 * STATE
    assert kept.redundancy.undone_steps > 0


@pytest.mark.parametrize(("kind", "more"), [("cpu", 4 * STATE), ("cuda", 0)])
def test_they_take_the_memory_of_the_host(kind: str, more: int) -> None:
    schedule = build("1f1b", 2, 4)
    taken = [
        memory(on(kind), made, predict(on(kind), made, schedule).simulation, None).ranks[0].peak_bytes
        for made in (plan(1, 1), crossed(2))
    ]
    assert taken[1] - taken[0] == more
