import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_text import lines, table, text

from planner.schedule.passes import add_recompute, repeat, with_stage_ranks
from planner.schedule.registry import build
from planner.schedule.validate import ScheduleError
from planner.simulation.simulate import Costs, simulate


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


def test_a_repeated_window_numbers_its_microbatches_on():
    assert text(repeat(build("1f1b", 2, 2), 2)) == lines("""
        0F0 0F1 0B0 0B1 0F2 0F3 0B2 0B3
        1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
    """)
    schedule = build("zbv", 3, 6)
    assert repeat(schedule, 1) == schedule


@pytest.mark.parametrize("family", ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"])
def test_windows_in_a_row_overlap(family: str):
    schedule = build(family, 4, 8)
    costs = Costs.uniform(forward_s=1, input_grad_s=1, weight_grad_s=1)
    once, thrice = (simulate(repeat(schedule, times), costs).makespan_s for times in (1, 3))
    work_s = 8 * 3 * schedule.stages / 4
    assert once + 2 * work_s <= thrice <= 3 * once


def test_programs_change_ranks_whole():
    schedule = build("1f1b", 3, 2)
    placed = with_stage_ranks(schedule, (2, 0, 1))
    assert placed.programs == (schedule.programs[1], schedule.programs[2], schedule.programs[0])
    assert [placed.rank_of_stage[stage] for stage in range(3)] == [2, 0, 1]
    assert with_stage_ranks(placed, (0, 1, 2)) == schedule
    assert with_stage_ranks(schedule, (0, 1, 2)) is schedule


@pytest.mark.parametrize("stage_ranks", [(0, 1, 1, 0), (0, 0, 1, 1), (0, 2, 2, 0)])
def test_stages_of_one_rank_stay_together(stage_ranks: tuple[int, ...]):
    with pytest.raises(ScheduleError, match="only whole"):
        with_stage_ranks(build("interleaved", 2, 2, 2), stage_ranks)
