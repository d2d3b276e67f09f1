"""A move is decided on if it pays over the steps that the ranks' speeds last, and says why."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import small_profile

from planner.adapt.policy import (
    IN_FORCE_STEPS,
    STALL_S,
    MoveDecision,
    SpeedForecast,
    decide,
    move_cost_s,
    moved_bytes,
)
from planner.freeze.decision import profiled_ratios
from planner.plan import Plan, PlanError
from planner.profile import Link
from planner.schedule.expand import schedule_of
from planner.search.recut import predicted
from planner.search.replan import Replanner
from planner.shards import Piece
from planner.simulation.predict import predict

SLOW = Link(latency_s=0.0, bytes_per_s=10.0)


def made(
    *counts: int,
    microbatches: int = 8,
    link: Link = small_profile.FAST,
    standbys: bool = False,
    memory_bytes: int = 1_000_000,
    **costs: int,
) -> Replanner:
    device = replace(small_profile.DEVICE, memory_bytes=memory_bytes)
    profile = small_profile.profile(
        *(small_profile.layer(f"layer{number}", **costs) for number in range(sum(counts))),
        ranks=len(counts),
        link=link,
        device=device,
    )
    plan = small_profile.plan(*counts, microbatches=microbatches, partition="dynpipe")
    return Replanner(
        first=plan,
        schedule=schedule_of(plan),
        parameters=(10,) * sum(counts),
        copies=int(standbys),
        profile=profile,
    )


def decided(
    replanner: Replanner,
    *slowdowns: float | None,
    now: Plan | None = None,
    remaining: int = 1000,
    lasting: int = 200,
    before: Sequence[float | None] | None = None,
    share: float = 0.5,
    **freezing: Any,
) -> MoveDecision:
    plan = now or replanner.first
    return decide(
        replanner,
        plan,
        [str(place) for place in range(plan.world_size)],
        slowdowns,
        SpeedForecast(remaining_steps=remaining, lasting_steps=lasting, before=before, share=share),
        **freezing,
    )


def test_equal_ranks_keep_their_cut() -> None:
    decision = decided(made(4, 4, 4), 1.0, None, 1.0)
    assert decision.plan is None
    assert decision.reason.startswith("no cut saves 3% of a step: expected step ")


def test_a_plan_whose_layers_have_no_room_beside_those_that_leave_is_not_decided_on() -> None:
    replanner = made(2, 2, 2, 2, microbatches=4)
    now = replace(replanner.first, layers=((0, 2), (2, 3), (3, 6), (6, 8)))
    free = decided(replanner, *(1.0,) * 4, now=now)
    assert free.plan is not None
    prediction = predicted(replanner, now, "0123")
    assert prediction is not None
    # Place 1 is full: it can take no other layer before its own has left, and is no bottleneck.
    full = replace(replanner, limits=(None, prediction.memory.peak_bytes[1]))
    decision = decided(full, *(1.0,) * 4, now=now)
    assert decision.plan is None
    assert decision.then_s < decision.now_s
    assert decision.reason.endswith("but places have no room for the layers that would come beside their own")
    assert not decision.too_soon
    # What leaves the place alone is decided on, though other plans are faster.
    relieved = decided(full, 1.0, 1.0, 3.0, 1.0, now=now)
    assert relieved.plan is not None
    assert set(relieved.plan.layers_of_place(1)) <= {2}


@pytest.mark.parametrize("factor", [1.8, 3.2])
@pytest.mark.parametrize("slow", range(3))
def test_a_slow_rank_is_relieved_as_well_as_any_cut_can(slow: int, factor: float) -> None:
    replanner = made(4, 4, 4)
    slowdowns = [factor if rank == slow else 1.0 for rank in range(3)]
    decision = decided(replanner, *slowdowns)
    assert decision.plan is not None
    profile = replanner.profile_on("012", slowdowns)
    steps = []
    for first, second in itertools.combinations(range(1, 12), 2):
        plan = small_profile.plan(first, second - first, 12 - second, microbatches=8)
        steps.append(predict(profile, plan, schedule_of(plan)).step_s)
    assert decision.then_s <= 1.02 * min(steps)
    assert decision.layers == decision.plan.layers_per_stage
    back = decided(replanner, 1.0, 1.0, 1.0, now=decision.plan)
    assert back.plan is not None
    assert back.plan.layers == replanner.first.layers


def test_each_plan_counts_with_its_own_freeze_ratios() -> None:
    replanner = made(4, 4, 4)
    # The first rank was the slow one: only its layers are frozen.
    in_force = tuple((1.0 if layer < 4 else 0.0,) * 8 for layer in range(12))
    slowdowns = (1.0, 1.0, 1.8)
    kept = decided(replanner, *slowdowns, ratios=in_force)
    joint = decided(replanner, *slowdowns, ratios=in_force, r_max=0.5)
    assert joint.plan is not None
    assert "with its own freeze ratios" in joint.reason
    profile = replanner.profile_on("012", slowdowns)

    def own_s(plan: Plan) -> float:
        schedule = schedule_of(plan)
        return predict(profile, plan, schedule, profiled_ratios(profile, plan, schedule, 0.5)).step_s

    assert (joint.now_s, joint.then_s) == (own_s(replanner.first), own_s(joint.plan))
    assert kept.plan is None or own_s(kept.plan) > joint.then_s


def test_what_ends_soon_does_not_pay() -> None:
    replanner = made(4, 4, 4)
    brief = decided(replanner, 3.0, 1.0, 1.0, lasting=IN_FORCE_STEPS)
    assert brief.plan is None
    assert brief.too_soon
    decision = decided(replanner, 3.0, 1.0, 1.0, remaining=IN_FORCE_STEPS)
    assert decision.plan is None
    assert decision.reason.endswith(
        "over 0 steps that saves 0.00 s, and the move costs 0.10 s: it does not pay"
    )
    assert not decision.too_soon, "no longer speed would help a job that ends"
    assert decided(replanner, 3.0, 1.0, 1.0, lasting=IN_FORCE_STEPS + 1).plan is not None


def test_the_way_back_counts() -> None:
    replanner = made(4, 4, 4)
    beside, alone = (1.0, 3.2, 1.0), (1.0, 1.0, 1.0)
    relieved = decided(replanner, *beside, before=alone)
    assert relieved.plan is not None
    back = decided(replanner, *alone, now=relieved.plan, lasting=5, before=beside)
    assert back.plan is None, "a neighbour that comes again soon costs more than the even cut saves"
    assert back.too_soon
    assert "the way back" in back.reason
    assert decided(replanner, *alone, now=relieved.plan, lasting=5).plan is not None
    # A job that ends before knows no way back.
    assert (
        decided(replanner, *alone, now=relieved.plan, lasting=5, remaining=5, before=beside).plan is not None
    )
    assert decided(replanner, *alone, now=relieved.plan, lasting=100, before=beside).plan is not None


def test_a_plan_that_is_faster_on_the_mean_of_both_speeds_stays_through_both() -> None:
    replanner = made(4, 4, 4)
    beside, alone = (1.0, 3.2, 1.0), (1.0, 1.0, 1.0)
    through = decided(replanner, *beside, lasting=1, before=alone, share=0.5)
    assert through.plan is not None
    assert "over 197 steps of speeds that come and go that saves" in through.reason
    back = decided(replanner, *alone, now=through.plan, lasting=1, before=beside, share=0.5)
    assert back.plan is None
    rare = decided(replanner, *beside, lasting=1, before=alone, share=0.05)
    assert rare.plan is None, "the neighbour is mostly away"
    assert rare.too_soon
    again = decided(replanner, *alone, now=through.plan, lasting=1, before=beside, share=0.95)
    assert again.plan is not None


def test_a_move_costs_what_its_bytes_take_on_their_links() -> None:
    replanner = made(4, 4, link=SLOW)
    assert replanner.profile is not None
    then = small_profile.plan(2, 6, microbatches=8)
    assert moved_bytes(replanner.profile, replanner.first, then) == {(0, 1): 2 * 120}
    assert move_cost_s(replanner.profile, replanner.first, then) == pytest.approx(0.1 * 24 + STALL_S)
    cluster = replanner.profile.cluster
    devices = tuple(replace(device, kind="cpu", stream_s_per_byte=0.25) for device in cluster.devices)
    on_host = replace(replanner.profile, cluster=replace(cluster, devices=devices))
    assert move_cost_s(on_host, replanner.first, then) == pytest.approx(240 * 0.25 + 0.1 * 24 + STALL_S)
    copied = replace(replanner.first, standbys=((1,),) * 4 + ((0,),) * 4)
    assert moved_bytes(replanner.profile, copied, then) == {}
    twice = replace(then, replicas=2)
    both = moved_bytes(replanner.profile, replace(replanner.first, replicas=2), twice)
    # Layers come from their owner in the first pipeline.
    assert both == {(0, 1): 2 * 120, (0, 3): 2 * 120}


def test_a_shard_moves_from_its_owner_without_what_the_other_pipelines_keep() -> None:
    replanner = made(4, 4, link=SLOW)
    assert replanner.profile is not None
    now = replace(replanner.first, replicas=2, shard="optimizer")
    then = replace(small_profile.plan(2, 6, microbatches=8, replicas=2), shard="optimizer")
    # 32-bit weights, as large as gradients, and the optimizer's state: half of them in each pipeline.
    half = 2 * (30 + 80) // 2
    assert moved_bytes(replanner.profile, now, then) == {(0, 1): half, (2, 3): half}
    copied = replace(now, standbys=((1,), ()) * 4 + ((), ()) * 4)
    assert moved_bytes(replanner.profile, copied, then) == {(2, 3): half}


def test_a_place_needs_room_for_the_module_of_a_shard_beside_its_copy() -> None:
    roomy = made(2, 2)
    assert roomy.profile is not None
    now = replace(roomy.first, replicas=2, shard="optimizer")
    then = replace(now, layers=((0, 3), (3, 4)))
    copying = replace(now, standbys=(*((),) * 4, (0,), (2,), (), ()))
    peak = predict(roomy.profile, copying, roomy.schedule).memory.peak_bytes[0]
    enough, places = peak + 40, [str(place) for place in range(4)]
    made(2, 2, memory_bytes=enough).check_memory(copying, places, now, then)
    short = made(2, 2, memory_bytes=enough - 1)
    short.check_memory(copying, places, now)
    with pytest.raises(PlanError, match=r"place 0 would need .*, which is 1 byte more than its device has"):
        short.check_memory(copying, places, now, then)
    # For another generation, its layers with their states.
    whole = Piece(2), Piece(3)
    enough = peak + sum(roomy.profile.model.layers[layer].state_bytes for layer, _ in whole)
    made(2, 2, memory_bytes=enough).check_memory(copying, places, now, ahead=[(), (), whole])
    short = made(2, 2, memory_bytes=enough - 1)
    with pytest.raises(PlanError, match=r"place 0 would need .*, which is 1 byte more than its device has"):
        short.check_memory(copying, places, now, ahead=[(), (), whole])


def test_a_new_standby_costs_what_a_new_owner_costs() -> None:
    replanner = made(4, 4, 4, link=SLOW)
    assert replanner.profile is not None
    now = replace(replanner.first, standbys=((1,),) * 4 + ((2,),) * 4 + ((1,),) * 4)
    then = small_profile.plan(
        3, 5, 4, microbatches=8, standbys=((1,),) * 3 + ((0,),) * 2 + ((2,),) * 2 + ((0,), *((1,),) * 4)
    )
    # Place 1 takes over layer 3 from its copy, and place 0 keeps what it has of it. Place 1 sends layers 4 and 7.
    assert moved_bytes(replanner.profile, now, then) == {(1, 0): 2 * 120}
    other = replace(then, standbys=((1,),) * 3 + ((2,),) * 5 + ((1,),) * 4)
    # Its new owner sends it, once it has it.
    assert moved_bytes(replanner.profile, now, other) == {(1, 2): 120}


def test_a_move_that_costs_more_than_it_saves_is_refused() -> None:
    quick = Link(latency_s=0.0, bytes_per_s=1e9)
    dear = made(4, 4, link=quick, parameter_bytes=10**13, memory_bytes=10**15)
    decision = decided(dear, 3.0, 1.0, lasting=IN_FORCE_STEPS + 1)
    assert decision.plan is None
    assert decision.cost_s > decision.now_s - decision.then_s > 0
    assert decision.reason.endswith("it does not pay")
    cheap = made(4, 4, link=quick, memory_bytes=10**15)
    assert decided(cheap, 3.0, 1.0, lasting=IN_FORCE_STEPS + 1).plan is not None


def test_without_a_profile_nothing_is_decided() -> None:
    with pytest.raises(ValueError, match="without a profile"):
        decided(replace(made(4, 4), profile=None), 1.0, 3.0)


def two_pipelines(**changes: Any) -> Replanner:
    """Two pipelines of two ranks, with four layers each."""
    replanner = made(4, 4)
    assert replanner.profile is not None
    first = replace(replanner.first, replicas=2)
    cluster = small_profile.profile(*replanner.profile.model.layers, ranks=4).cluster
    devices = tuple(replace(device, memory_bytes=1_000_000) for device in cluster.devices)
    profile = replace(replanner.profile, cluster=replace(cluster, devices=devices))
    return replace(replanner, first=first, profile=profile, **changes)


def test_a_slow_pipeline_gets_a_smaller_share_and_no_layer_moves() -> None:
    replanner = two_pipelines()
    decision = decided(replanner, 1.0, 1.0, 3.2, 3.2)
    assert decision.plan == replace(replanner.first, shares=(13, 3))
    assert decision.reason.startswith("expected step ")
    assert "with [4, 4] layers, 13 + 3 microbatches in its pipelines; over 197 steps" in decision.reason
    assert decision.cost_s == pytest.approx(STALL_S)
    assert decision.then_s < 0.55 * decision.now_s
    again = decided(replanner, 1.0, 1.0, 3.2, 3.2, now=decision.plan)
    assert again.plan is None
    back = decided(replanner, 1.0, 1.0, 1.0, 1.0, now=decision.plan)
    assert back.plan is not None
    assert (back.plan.layers, back.plan.shares) == (replanner.first.layers, ())


def test_a_slow_rank_of_two_pipelines_is_relieved_by_cut_or_shares_whichever_is_better() -> None:
    replanner = two_pipelines()
    slowdowns = (1.0, 1.0, 1.0, 2.0)
    decision = decided(replanner, *slowdowns)
    without = decided(two_pipelines(divisible=False), *slowdowns)
    assert decision.plan is not None
    assert decision.then_s <= without.then_s
    assert without.plan is None or without.plan.shares == ()
    profile = replanner.profile_on("0123", slowdowns)
    shares = [replace(replanner.first, shares=(n, 16 - n)) for n in range(8, 16)]
    best_s = min(predict(profile, plan, replanner.schedule).step_s for plan in shares)
    assert decision.then_s <= 1.01 * best_s


def test_a_slow_rank_gives_its_long_layer_away_if_there_is_time_for_it() -> None:
    quick = Link(latency_s=0.0, bytes_per_s=1e9)
    replanner = made(4, 4, 4, 4, link=quick, parameter_bytes=10**12, memory_bytes=10**15)
    assert replanner.profile is not None
    long = small_profile.layer("long", forward_s=8.0, parameter_bytes=10**12)
    model = replace(replanner.profile.model, layers=(long, *replanner.profile.model.layers[1:]))
    replanner = replace(replanner, profile=replace(replanner.profile, model=model))
    exchanged = decided(replanner, 3.0, 1.0, 1.0, 1.0, remaining=10_000, lasting=10_000)
    assert exchanged.plan is not None
    assert exchanged.plan.stage_ranks[0] != 0
    assert f"on ranks {list(exchanged.plan.stage_ranks)}" in exchanged.reason
    brief = decided(replanner, 3.0, 1.0, 1.0, 1.0, lasting=IN_FORCE_STEPS + 1)
    assert brief.plan is None or brief.plan.stage_ranks == (0, 1, 2, 3)
    assert brief.cost_s < exchanged.cost_s
