"""Memory over time, counted by hand: P = 2, M = 2, one layer per stage unless said otherwise.

Layer a keeps 100 bytes of a microbatch, including its batch and its output. Layer b keeps 100 and the 7 of
its input, which arrived as a message. During a's backward, the 2 bytes of the received gradient are alive
too.
"""

from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_text import table
from small_profile import layer, plan, profile

from planner.freezing import Ratios
from planner.ir import ActionKind, Schedule
from planner.plan import Plan
from planner.profile import Link, Matrix, Profile
from planner.schedule.passes import add_recompute
from planner.schedule.registry import build
from planner.simulation.costs import action_costs
from planner.simulation.memory import MemoryParts, RankMemory, memory, memory_over_time
from planner.simulation.simulate import Costs, simulate

SIZES = {
    "parameter_bytes": 10_000,
    "optimizer_bytes": 20_000,
    "gradient_bytes": 3_000,
    "activation_bytes": 100,
    "input_bytes": 7,
    "weight_grad_hold_bytes": 20,
    "boundary_bytes": 4,
    "boundary_grad_bytes": 2,
}
TWO = profile(layer("a", **SIZES), layer("b", **SIZES))
BASE = 30_000
"""Weights and optimizer state."""
STATE = BASE + 3_000
"""With the sums of gradients, whose memory stays from step to step."""
UNIT = Costs.uniform(forward_s=1, input_grad_s=1, weight_grad_s=1)


def parts(**sizes: int) -> MemoryParts:
    nothing = {field.name: 0 for field in fields(MemoryParts)}
    return MemoryParts(**{**nothing, "weights": 10_000, "optimizer": 20_000, **sizes})


def ranks(
    schedule: Schedule, plan: Plan, profile: Profile = TWO, ratios: Ratios | None = None
) -> tuple[RankMemory, ...]:
    return memory(profile, plan, simulate(schedule, UNIT), ratios).ranks


def above_state(rank: RankMemory) -> dict[float, int]:
    return {time_s: size - STATE for time_s, size in rank.timeline}


def test_gpipe():
    first, last = ranks(build("gpipe", 2, 2), plan(1, 1, schedule="gpipe"))
    # 0F0 0-1, 0F1 1-2, 0B0 5-7, 0B1 7-9; each forward is kept until its backward ends.
    assert above_state(first) == {0: 100, 1: 200, 5: 202, 7: 102, 9: 0}
    # 1F0 1-2, 1F1 2-3, 1B0 3-5, 1B1 5-7.
    assert above_state(last) == {0: 0, 1: 107, 2: 214, 5: 107, 7: 0}
    assert first.peak == parts(gradients=3_000, activations=200, working=2)
    assert (first.peak_bytes, last.peak_bytes) == (33_202, 33_214)


def test_1f1b():
    first, last = ranks(build("1f1b", 2, 2), plan(1, 1))
    # 0F0 0-1, 0F1 1-2, 0B0 4-6, 0B1 7-9. 0F1's output waits from 2 to 4, but it is kept anyway.
    assert above_state(first) == {0: 100, 1: 200, 4: 202, 6: 100, 7: 102, 9: 0}
    # 1F0 1-2, 1B0 2-4, 1F1 4-5, 1B1 5-7: one microbatch at a time.
    assert above_state(last) == {0: 0, 1: 107, 7: 0}
    assert (first.peak_bytes, last.peak_bytes) == (33_202, 33_107)


def test_zb_h1_holds_what_its_weight_gradients_need():
    first, last = ranks(build("zb-h1", 2, 2), plan(1, 1, schedule="zb-h1"))
    # 0F0 0-1, 0F1 1-2, 0I0 3-4, 0W0 4-5, 0I1 5-6, 0W1 6-7.
    assert above_state(first) == {0: 100, 1: 200, 3: 202, 4: 120, 5: 102, 6: 20, 7: 0}
    # 1F0 1-2, 1I0 2-3, 1F1 3-4, 1I1 4-5, 1W0 5-6, 1W1 6-7: both weight gradients wait.
    assert above_state(last) == {0: 0, 1: 107, 3: 127, 5: 40, 6: 20, 7: 0}
    assert last.peak == parts(gradients=3_000, activations=107, weight_grad_holds=20)


def test_a_recomputing_layer_keeps_its_input_until_its_recompute():
    recomputing = replace(plan(1, 1), recompute=(0, 1))
    first, last = ranks(add_recompute(build("1f1b", 2, 2), {0, 1}), recomputing)
    # 0F0 0-1, 0F1 1-2, 0R0 2-3, 0B0 5-7, 0R1 7-8, 0B1 9-11; 0F1's output waits from 2 to 5 and is not kept anyway.
    assert above_state(first) == {0: 7, 1: 14, 2: 111, 5: 109, 7: 100, 9: 102, 11: 0}
    # 1F0 1-2, 1R0 2-3, 1B0 3-5, 1F1 5-6, 1R1 6-7, 1B1 7-9.
    assert above_state(last) == {0: 0, 1: 7, 2: 107, 5: 7, 6: 107, 9: 0}


def test_layers_of_a_recomputing_stage_that_do_not_recompute_keep_everything():
    four = profile(layer(**SIZES), layer(**SIZES), layer(**SIZES), layer(**SIZES))
    first, _ = ranks(
        add_recompute(build("gpipe", 2, 2), {0}),
        replace(plan(2, 2, schedule="gpipe"), recompute=(1,)),
        four,
    )
    assert first.timeline[:3] == ((0, 66_100), (1, 66_200), (2, 66_300))


def test_frozen_shares_are_neither_held_nor_formed():
    split, halves = build("zb-h1", 2, 2), plan(1, 1, schedule="zb-h1")
    # Layer a forms gradients of microbatch 1 alone; a quarter and a half of layer b's weights are frozen.
    first, last = ranks(split, halves, ratios=((1.0, 0.0), (0.25, 0.5)))
    assert above_state(first) == {0: 100, 1: 200, 3: 202, 4: 100, 5: 102, 6: 20, 7: 0}
    assert above_state(last) == {0: 0, 1: 107, 3: 122, 5: 25, 6: 10, 7: 0}
    # A layer that is frozen in every microbatch has no gradient at all.
    everything = ranks(split, halves, ratios=((1.0, 1.0),) * 2)
    assert [rank.peak.gradients for rank in everything] == [0, 0]
    assert [rank.timeline[-1][1] for rank in everything] == [BASE, BASE]


def test_a_message_is_kept_until_its_receiver_has_taken_it():
    """It takes two seconds on the link, then half a second of the receiver."""
    schedule = build("1f1b", 2, 1)
    link = Link(latency_s=0.0, bytes_per_s=2.0, receiver_s=0.5)
    slow = profile(layer("a", **SIZES), layer("b", **SIZES), link=link)
    halves = plan(1, 1, microbatches=1)
    simulation = simulate(schedule, replace(UNIT, messages=action_costs(slow, halves, schedule).messages))
    first, last = memory(slow, halves, simulation).ranks
    # 0F0 0-1, 1F0 3.5-4.5, 1B0 4.5-6.5, its gradient of 2 bytes travels until 7.5, 0B0 8-10.
    assert above_state(first) == {0: 100, 8: 102, 10: 0}
    assert above_state(last) == {0: 0, 3.5: 107, 6.5: 2, 8: 0}


def test_stages_of_one_rank_are_counted_together():
    four = profile(*[layer(**SIZES)] * 4)
    first, last = ranks(build("zbv", 2, 2), plan(1, 1, 1, 1, schedule="zbv", chunks=2), four)
    for rank in (first, last):
        assert rank.timeline[0][1] in (66_000, 66_100)
        assert rank.timeline[-1][1] == 66_000


def test_a_frozen_prefix_keeps_nothing_after_its_forwards():
    first, last = ranks(table("0F0 0F1\n1F0 1B0 1F1 1B1", 2, 2, frozen_stages=1), plan(1, 1))
    # 0F1's output waits from 2 to 4.
    assert first.timeline == ((0, BASE + 100), (2, BASE + 4), (4, BASE))
    assert last.peak.gradients == 3_000


def test_actions_need_working_memory():
    """A stage has layers that keep 100 and 300. In the forward the first needs 250 beside its 100, which
    stays below the 400 of both. In the backward the last needs 50 beside everything, then the first 250
    beside its own."""
    sizes = {**SIZES, "boundary_grad_bytes": 0}
    stage = (layer(**{**sizes, "working_bytes": 250}), layer(**{**sizes, "activation_bytes": 300}))
    alone, one = plan(2, microbatches=1), build("1f1b", 1, 1)
    (rank,) = ranks(one, alone, profile(*stage, ranks=1))
    assert rank.timeline == ((0, 66_400), (3, 66_000))
    stage = (stage[0], replace(stage[1], working_bytes=50))
    (rank,) = ranks(one, alone, profile(*stage, ranks=1))
    assert rank.timeline == ((0, 66_450), (3, 66_000))
    assert rank.peak.working == 50
    stage = (replace(stage[0], working_bytes=1_000), stage[1])
    (rank,) = ranks(one, alone, profile(*stage, ranks=1))
    # 100 + 1,000 is 700 more than 400.
    assert rank.timeline == ((0, 67_100), (3, 66_000))
    # If only the second layer recomputes, the first one's working memory counts only in the forward.
    again = replace(alone, recompute=(1,))
    (rank,) = ranks(add_recompute(one, {0}), again, profile(*stage, ranks=1))
    assert rank.timeline == ((0, 67_100), (1, 66_450), (2, 67_100), (4, 66_000))


def test_a_backward_that_splits_needs_holds_beside_what_is_left():
    """Before the backward of the first of two layers, the second's hold and a gradient between them live."""
    sizes = {**SIZES, "weight_grad_hold_bytes": 500}
    (rank,) = ranks(
        build("zb-h1", 1, 1),
        plan(2, schedule="zb-h1", microbatches=1),
        profile(layer(**sizes), layer(**sizes), ranks=1),
    )
    # I 1-2: 200, then 100 + 500 + 2, then 1,000; W 2-3.
    assert rank.timeline == ((0, 66_200), (1, 67_000), (3, 66_000))


def test_matrices_of_one_shape_share_scratch_and_receives_are_posted_ahead():
    def matrix(shape: tuple[int, ...], size: int) -> Matrix:
        return Matrix(name="w", parameters=1, weight_grad_s=0.0, shape=shape, scratch_bytes=size)

    wide = layer(**SIZES, matrices=(matrix((2, 4), 64), matrix((4, 4), 128)))
    two = profile(wide, replace(wide, matrices=(matrix((2, 4), 64), matrix((2, 4), 64))))
    two = replace(two, cluster=replace(two.cluster, receives_ahead=2))
    first, last = ranks(build("gpipe", 2, 3), plan(1, 1, schedule="gpipe", microbatches=3), two)
    assert (first.peak.scratch, last.peak.scratch) == (64 + 128, 64)
    # Receives are posted for two gradients of 2 bytes each and for two activations of 4.
    assert first.timeline[0] == (0, STATE + 64 + 128 + 100 + 2 * 2)
    # 1F0 consumes one and posts the third; after 1F1 and 1F2 fewer are left.
    assert last.timeline[:4] == (
        (0, STATE + 64 + 2 * 4),
        (1, STATE + 64 + 107 + 2 * 4),
        (2, STATE + 64 + 2 * 107 + 4),
        (3, STATE + 64 + 3 * 107),
    )
    # A receiver allocates for no more messages than arrive.
    two = replace(two, cluster=replace(two.cluster, receives_ahead=5))
    first, last = ranks(build("gpipe", 2, 3), plan(1, 1, schedule="gpipe", microbatches=3), two)
    assert first.timeline[0] == (0, STATE + 64 + 128 + 100 + 3 * 2)
    assert last.timeline[0] == (0, STATE + 64 + 3 * 4)


def test_what_memory_is_used_for_over_time():
    halves = plan(1, 1, schedule="zb-h1")
    first, last = memory_over_time(TWO, halves, simulate(build("zb-h1", 2, 2), UNIT))
    # 0F0 0-1, 0F1 1-2, 0I0 3-4, 0W0 4-5, 0I1 5-6, 0W1 6-7.
    assert first == (
        (0, parts(activations=100, gradients=3_000)),
        (1, parts(activations=200, gradients=3_000)),
        (3, parts(activations=200, gradients=3_000, working=2)),
        (4, parts(activations=100, weight_grad_holds=20, gradients=3_000)),
        (5, parts(activations=100, gradients=3_000, working=2)),
        (6, parts(weight_grad_holds=20, gradients=3_000)),
        (7, parts(gradients=3_000)),
    )
    assert last[0] == (0, parts(gradients=3_000))
    assert last[-1] == (7, parts(gradients=3_000))


def test_an_action_of_no_duration_needs_its_memory_for_a_moment():
    quick = simulate(build("1f1b", 2, 2), Costs.uniform(forward_s=1, input_grad_s=0, weight_grad_s=0))
    first, _ = memory_over_time(TWO, plan(1, 1), quick)
    # 0F0 0-1, 0F1 1-2, 0B0 at 2, 0B1 at 3.
    assert [(time_s, used.total - STATE) for time_s, used in first] == [
        (0, 100),
        (1, 200),
        (2, 202),
        (2, 100),
        (3, 102),
        (3, 0),
    ]
    assert memory(TWO, plan(1, 1), quick).ranks[0].peak_bytes == 202 + STATE


def test_ratios_of_another_size_are_refused():
    with pytest.raises(ValueError, match=r"a row per layer .* of 2 layers"):
        ranks(build("1f1b", 2, 2), plan(1, 1), ratios=((0.0, 0.0),))


def test_a_schedule_without_the_plans_recomputes_is_refused():
    with pytest.raises(ValueError, match=r"recomputes layers \[1\] of stage 1, the schedule has no R"):
        ranks(build("1f1b", 2, 2), replace(plan(1, 1), recompute=(1,)))


@given(
    name=st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"]),
    size=st.integers(1, 4),
    rounds=st.integers(1, 3),
    recompute=st.booleans(),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_nothing_is_lost_or_counted_twice(
    name: str, size: int, rounds: int, recompute: bool, data: st.DataObject
):
    """The timeline equals a plain count at every moment, from the actions' own times."""
    schedule = build(name, size, size * rounds)
    stages, microbatches = schedule.stages, schedule.microbatches
    model = profile(*[layer(**SIZES)] * stages, ranks=size)
    chunks = stages // size
    cut = plan(*[1] * stages, schedule=name, chunks=chunks, microbatches=microbatches)
    if recompute:
        cut = replace(cut, recompute=tuple(range(stages)))
        schedule = add_recompute(schedule, range(stages))
    ratio = st.sampled_from([0.0, 0.25, 0.5, 1.0])
    ratios = tuple(
        tuple(data.draw(st.lists(ratio, min_size=microbatches, max_size=microbatches))) for _ in range(stages)
    )
    seconds = st.lists(st.integers(1, 5), min_size=stages, max_size=stages).map(tuple)
    simulation = simulate(
        schedule, Costs({kind: data.draw(seconds) for kind in ActionKind}, communication_s=1)
    )
    starts, ends = {}, {}
    for spans in simulation.timeline:
        for span in spans:
            starts[span.action.kind, span.action.stage, span.action.index] = span.start_s
            ends[span.action.kind, span.action.stage, span.action.index] = span.end_s

    def of_stage(stage: int, t: float) -> float:
        total = 3_000.0 * any(ratio < 1 for ratio in ratios[stage])
        for index in range(microbatches):
            back = (
                ActionKind.BACKWARD
                if (ActionKind.BACKWARD, stage, index) in starts
                else ActionKind.INPUT_GRAD
            )
            arrives = stage > 0 and (recompute or cut.stage_ranks[stage - 1] != cut.stage_ranks[stage])
            if starts[ActionKind.FORWARD, stage, index] <= t < ends[back, stage, index]:
                dropped = recompute and t < starts[ActionKind.RECOMPUTE, stage, index]
                total += 7 if dropped else 100 + 7 * arrives
            if starts[back, stage, index] <= t < ends[back, stage, index]:
                total += 2 * (stage < stages - 1)
            if (
                back is ActionKind.INPUT_GRAD
                and ends[back, stage, index] <= t < ends[ActionKind.WEIGHT_GRAD, stage, index]
            ):
                total += 20 * (1 - ratios[stage][index])
            if (
                recompute
                and stage + 1 < stages
                and ends[ActionKind.FORWARD, stage, index] <= t < starts[ActionKind.FORWARD, stage + 1, index]
            ):
                total += 4
            if stage and ends[back, stage, index] <= t < starts[back, stage - 1, index]:
                total += 2
        return total

    for rank, measured in enumerate(memory(model, cut, simulation, ratios).ranks):
        held = schedule.stages_of_rank(rank)
        times = [time_s for time_s, _ in measured.timeline]
        assert times == sorted(set(times))
        for time_s, size_bytes in measured.timeline:
            assert size_bytes == BASE * len(held) + sum(of_stage(stage, time_s) for stage in held)
        # Within one moment, nothing is counted between releases and allocations.
        assert measured.peak_bytes == max(size_bytes for _, size_bytes in measured.timeline)
    for rank, over_time in zip(
        memory(model, cut, simulation, ratios).ranks,
        memory_over_time(model, cut, simulation, ratios),
        strict=True,
    ):
        assert max(used.total for _, used in over_time) == rank.peak_bytes
        assert rank.peak in [used for _, used in over_time]
        for time_s, size_bytes in rank.timeline:
            assert size_bytes == [used.total for at_s, used in over_time if at_s <= time_s][-1]
