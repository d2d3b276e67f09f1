import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_text import lines, table, text

from planner.ir import Kind
from planner.passes import add_recompute, forward_only
from planner.schedules.registry import build
from planner.simulate import Costs, simulate
from planner.validate import ScheduleError


def test_recompute_comes_right_before_the_backward():
    schedule = build("1f1b", 2, 2)
    assert text(add_recompute(schedule, {1})) == lines("""
        0F0 0F1 0B0 0B1
        1F0 1R0 1B0 1F1 1R1 1B1
    """)
    assert text(schedule) == lines("""
        0F0 0F1 0B0 0B1
        1F0 1B0 1F1 1B1
    """)


def test_recompute_comes_right_before_the_input_gradient():
    assert text(add_recompute(build("zb-h1", 2, 2), [0, 1])) == lines("""
        0F0 0F1 0R0 0I0 0W0 0R1 0I1 0W1
        1F0 1R0 1I0 1F1 1R1 1I1 1W0 1W1
    """)


def test_recompute_of_no_stage_changes_nothing():
    schedule = build("zbv", 3, 6)
    assert add_recompute(schedule, ()) == schedule


def test_recompute_leaves_frozen_stages_alone():
    frozen = table("0F0\n1F0 1B0", 2, 1, frozen_stages=1)
    assert text(add_recompute(frozen, {0, 1})) == "0F0\n1F0 1R0 1B0"


def test_recompute_out_of_range_or_twice_is_refused():
    schedule = build("gpipe", 2, 1)
    with pytest.raises(ScheduleError, match=r"cannot recompute stage 2, stages are 0\.\.1"):
        add_recompute(schedule, {0, 2})
    with pytest.raises(ScheduleError, match="1R0: doubled"):
        add_recompute(add_recompute(schedule, {1}), {1})


@given(
    name=st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"]),
    ranks=st.integers(1, 5),
    rounds=st.integers(1, 4),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_recompute_adds_one_forward_per_stage_and_microbatch(
    name: str, ranks: int, rounds: int, data: st.DataObject
):
    schedule = build(name, ranks, ranks * rounds)
    stages = data.draw(st.sets(st.integers(0, schedule.stages - 1)))
    costs = Costs.uniform(forward_s=1, input_grad_s=1, weight_grad_s=1)
    before, after = simulate(schedule, costs), simulate(add_recompute(schedule, stages), costs)
    assert sum(after.busy_s) - sum(before.busy_s) == len(stages) * ranks * rounds
    assert after.in_flight == before.in_flight


def test_forward_only_keeps_the_forwards_in_their_order():
    schedule = forward_only(build("interleaved", 2, 4))
    assert text(schedule) == lines("""
        0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3
        1F0 1F1 3F0 3F1 1F2 1F3 3F2 3F3
    """)
    assert schedule.frozen_stages == schedule.stages == 4


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"])
@pytest.mark.parametrize("microbatches", [1, 3, 8])
def test_forward_only_of_the_first_microbatches(name: str, microbatches: int):
    schedule = forward_only(build(name, 4, 8), microbatches)
    assert schedule.microbatches == microbatches
    actions = [action for program in schedule.programs for action in program]
    assert {action.kind for action in actions} == {Kind.FORWARD}
    assert len(actions) == schedule.stages * microbatches


@pytest.mark.parametrize("microbatches", [0, -1, 9])
def test_forward_only_of_too_many_is_refused(microbatches: int):
    with pytest.raises(ScheduleError, match=f"cannot run the first {microbatches} microbatches"):
        forward_only(build("1f1b", 4, 8), microbatches)
