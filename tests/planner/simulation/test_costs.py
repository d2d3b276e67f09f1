"""From layers to the costs of actions and messages."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_profile import DEVICE, layer, plan, profile

from planner.ir import Action, ActionKind
from planner.profile import Link
from planner.schedule.passes import add_recompute
from planner.schedule.registry import build
from planner.simulation.costs import action_costs, boundary_bytes, bounds, update_s
from planner.simulation.simulate import Costs, simulate

LINK = Link(latency_s=0.5, bytes_per_s=8.0)
UNEVEN = profile(
    layer("a", forward_s=1.0, input_grad_s=2.0, weight_grad_s=4.0, boundary_bytes=1, boundary_grad_bytes=2),
    layer("b", forward_s=8.0, input_grad_s=16.0, weight_grad_s=32.0, boundary_bytes=4, boundary_grad_bytes=8),
    layer("c", forward_s=64.0, input_grad_s=128.0, weight_grad_s=256.0, boundary_bytes=16),
    link=LINK,
)
PLAN = plan(2, 1)


def of(costs: Costs, *tokens: str) -> list[float]:
    return [costs.of_action(Action.parse(token)) for token in tokens]


def test_stages_add_up_their_layers():
    costs = action_costs(UNEVEN, PLAN, build("1f1b", 2, 2))
    assert of(costs, "0F0", "0I0", "0W0", "0B0") == [9, 18, 36, 54]
    assert of(costs, "1F1", "1I1", "1W1", "1B1") == [64, 128, 256, 384]
    assert of(costs, "0R0", "1R0", "0U0", "1U0") == [0, 0, 1, 0.5]


def test_a_cut_sends_what_the_layer_before_it_gives_and_gets():
    costs = action_costs(UNEVEN, PLAN, build("1f1b", 2, 2))
    assert costs.messages is not None
    assert costs.messages.forward_bytes == (4, 0)
    assert costs.messages.backward_bytes == (0, 8)
    assert costs.messages.links[0][1] == LINK
    assert boundary_bytes(UNEVEN, plan(1, 1, 1)) == ((1, 4, 0), (0, 2, 8))


def test_a_slow_device_takes_longer_for_everything():
    devices = (DEVICE, replace(DEVICE, slowdown=1.5))
    slow = replace(UNEVEN, cluster=replace(UNEVEN.cluster, devices=devices))
    costs = action_costs(slow, PLAN, build("1f1b", 2, 2), ((0.5,) * 2,) * 3)
    assert of(costs, "0F0", "0B0", "0U0") == [9, 18 + 18, 1]
    assert of(costs, "1F0", "1I0", "1B0", "1W0", "1U0") == [96, 192, 1.5 * (128 + 128), 384, 0.75]
    assert update_s(slow, PLAN) == (1, 0.75)
    split = action_costs(slow, PLAN, build("zb-h1", 2, 2), ((0.5,) * 2,) * 3)
    assert of(split, "0W0", "1W0") == [18, 1.5 * 128]


def test_stages_take_the_device_of_their_rank():
    """zbv folds: stages 0 and 3 are on rank 0."""
    devices = (replace(DEVICE, slowdown=2.0), DEVICE)
    four = profile(*[layer()] * 4)
    four = replace(four, cluster=replace(four.cluster, devices=devices))
    folded = plan(1, 1, 1, 1, schedule="zbv", chunks=2)
    assert folded.stage_ranks == (0, 1, 1, 0)
    costs = action_costs(four, folded, build("zbv", 2, 2))
    assert of(costs, "0F0", "1F0", "2F0", "3F0") == [2, 1, 1, 2]
    assert update_s(four, folded) == (2, 1)


def test_a_recompute_repeats_the_layers_that_recompute():
    costs = action_costs(UNEVEN, replace(PLAN, recompute=(1,)), add_recompute(build("1f1b", 2, 2), {0}))
    assert of(costs, "0R0", "0R1", "0B0") == [8, 8, 54]


def test_frozen_shares_cost_nothing_layer_by_layer():
    ratios = ((0.5, 0.0), (0.25, 1.0), (0.0, 0.75))
    full = action_costs(UNEVEN, PLAN, build("1f1b", 2, 2), ratios)
    assert of(full, "0B0", "0B1", "1B0", "1B1") == [18 + 2 + 24, 18 + 4, 128 + 256, 128 + 64]
    assert of(full, "0F0", "1F1") == [9, 64]
    split = action_costs(UNEVEN, PLAN, build("zb-h1", 2, 2), ratios)
    assert of(split, "0I0", "0W0", "0W1", "1I1", "1W1") == [18, 26, 4, 128, 64]


def test_bounds_are_the_costs_with_nothing_and_with_everything_frozen():
    for name in ("1f1b", "zb-h1"):
        upper, lower = bounds(UNEVEN, PLAN, build(name, 2, 2))
        if name == "1f1b":
            assert of(upper, "0B0", "1B1") == [54, 384]
            assert of(lower, "0B0", "1B1") == [18, 128]
        else:
            assert of(upper, "0I0", "0W0", "1W1") == [18, 36, 256]
            assert of(lower, "0I0", "0W0", "1W1") == [18, 0, 0]


@pytest.mark.parametrize(
    ("changed", "ratios", "problem"),
    [
        (plan(2, 2), None, "the plan cuts 4 layers, the profile has 3"),
        (plan(1), None, "the plan cuts 1 layer, the profile has 3"),
        (plan(1, 1, 1), None, "the plan has 3 pipeline ranks, the profile 2 devices"),
        (plan(3), None, "the plan has 1 stage, the schedule 2"),
        (PLAN, ((0.5, 0.5),) * 2, "a row per layer and .*, of 3 layers and 2 microbatches; got 2 rows of"),
        (
            PLAN,
            ((0.5,),) * 3,
            r"a column per microbatch, of 3 layers and 2 microbatches; got 3 rows of \[1\]",
        ),
    ],
)
def test_a_mismatch_is_named(changed, ratios, problem):
    with pytest.raises(ValueError, match=problem):
        action_costs(UNEVEN, changed, build("1f1b", 2, 2), ratios)


@given(
    name=st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_frozen_steps_last_between_the_bounds_and_no_longer_with_more_frozen(name: str, data: st.DataObject):
    schedule = build(name, 2, 3)
    row = st.lists(st.floats(0, 1), min_size=3, max_size=3).map(tuple)
    less = tuple(data.draw(st.lists(row, min_size=3, max_size=3)))
    more = tuple(tuple(ratio + (1 - ratio) / 2 for ratio in row) for row in less)
    lasts = [
        simulate(schedule, costs).makespan_s
        for costs in (
            *reversed(bounds(UNEVEN, PLAN, schedule)),
            action_costs(UNEVEN, PLAN, schedule, more),
            action_costs(UNEVEN, PLAN, schedule, less),
        )
    ]
    lower, upper, frozen_more, frozen_less = lasts
    assert lower <= frozen_more <= frozen_less <= upper


def test_only_weight_gradients_have_costs_per_action():
    costs = action_costs(UNEVEN, PLAN, build("1f1b", 2, 2), ((1.0, 1.0),) * 3)
    assert set(costs.actions) == {
        Action(ActionKind.BACKWARD, stage, index) for stage in (0, 1) for index in (0, 1)
    }
