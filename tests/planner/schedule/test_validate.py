"""Every kind of illegal schedule is refused, and the error names the place."""

import re
from typing import Any

import pytest
from schedule_text import lines, table

from planner.ir import Action, ActionKind, Schedule
from planner.schedule.validate import ScheduleError, validate

TWO_RANKS = """
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1
"""


def refused(text: str, stages: int, microbatches: int, **fields: Any) -> ScheduleError:
    with pytest.raises(ScheduleError) as caught:
        validate(table(text, stages, microbatches, **fields))
    return caught.value


def test_a_right_table_passes():
    validate(table(TWO_RANKS, 2, 2))


def test_b_and_split_backwards_may_be_mixed_over_microbatches():
    validate(table("0F0 0F1 0I0 0W0 0B1", 1, 2))


TRAPS = {
    "stage out of range": ("0F0 0B0\n1F0 1B0 2F0", 2, 1, "rank 1, position 2, 2F0: stage 2 is not in 0..1"),
    "microbatch out of range": (
        "0F0 0B0 0F1",
        1,
        1,
        "rank 0, position 2, 0F1: microbatch 1 is not in 0..0",
    ),
    "doubled": ("0F0 0B0 0F0", 1, 1, "rank 0, position 2, 0F0: doubled: already at rank 0, position 0"),
    "doubled on another rank": (
        "0F0 0B0\n0F0",
        1,
        1,
        "rank 1, position 0, 0F0: doubled: already at rank 0, position 0",
    ),
    "stage on two ranks": (
        "0F0 0F1\n0B0 0B1",
        1,
        2,
        "rank 1, position 0, 0B0: stage 0 is on two ranks, 0 and 1",
    ),
    "missing forward of a backward": (
        "0F0 0B0 0B1",
        1,
        2,
        "rank 0, position 2, 0B1: 0F1, which it needs, is missing",
    ),
    "missing forward": (
        "0F0 0B0",
        1,
        2,
        "rank 0: 0F1 is missing: of 1 stage and 2 microbatches, each stage goes forward with each microbatch",
    ),
    "missing stage": ("0F0 0B0", 2, 1, "no rank holds stage 1: 1F0 is missing"),
    "missing backward": (
        "0F0 0F1 0B0",
        1,
        2,
        "rank 0, position 1, 0F1: its backward is missing: 0B1, or 0I1 and 0W1",
    ),
    "missing weight gradient": (
        "0F0 0F1 0I0 0I1 0W1",
        1,
        2,
        "rank 0, position 2, 0I0: its weight gradient 0W0 is missing",
    ),
    "weight gradient with no input gradient": (
        "0F0 0W0",
        1,
        1,
        "rank 0, position 1, 0W0: 0I0, which it needs, is missing",
    ),
    "weight before input gradient": (
        "0F0 0W0 0I0",
        1,
        1,
        "rank 0, position 1, 0W0: comes before 0I0, which it needs",
    ),
    "backward before forward": (
        "0B0 0F0",
        1,
        1,
        "rank 0, position 0, 0B0: comes before 0F0, which it needs",
    ),
    "input gradient before forward": (
        "0I0 0F0 0W0",
        1,
        1,
        "rank 0, position 0, 0I0: comes before 0F0, which it needs",
    ),
    "B beside I": (
        "0F0 0B0 0I0 0W0",
        1,
        1,
        "rank 0, position 2, 0I0: 0B0 forms this input gradient already",
    ),
    "B beside W": ("0F0 0B0 0W0", 1, 1, "rank 0, position 2, 0W0: 0B0 forms this weight gradient already"),
    "forwards out of order": (
        "0F0 0F1 0B0 0B1\n1F1 1F0 1B0 1B1",
        2,
        2,
        "rank 1, position 1, 1F0: comes after 1F1: the forwards of a stage must be in ascending",
    ),
    "backwards out of order": (
        "0F0 0F1 0B1 0B0",
        1,
        2,
        "rank 0, position 3, 0B0: comes after 0B1: the backwards and input gradients of a stage",
    ),
    "input gradients out of order": (
        "0F0 0F1 0I1 0I0 0W0 0W1",
        1,
        2,
        "rank 0, position 3, 0I0: comes after 0I1: the backwards and input gradients of a stage",
    ),
    "weight gradients out of order": (
        "0F0 0F1 0I0 0I1 0W1 0W0",
        1,
        2,
        "rank 0, position 5, 0W0: comes after 0W1: the weight gradients of a stage",
    ),
    "a full backward before an earlier weight gradient": (
        "0F0 0F1 0I0 0B1 0W0",
        1,
        2,
        "rank 0, position 4, 0W0: comes after 0B1: the weight gradients of a stage",
    ),
    "recompute before its forward": (
        "0R0 0F0 0B0",
        1,
        1,
        "rank 0, position 0, 0R0: comes before 0F0, which it needs",
    ),
    "recompute after its backward": (
        "0F0 0B0 0R0",
        1,
        1,
        "rank 0, position 2, 0R0: recompute after 0B0, which needs it before",
    ),
    "recompute after its input gradient": (
        "0F0 0I0 0R0 0W0",
        1,
        1,
        "rank 0, position 2, 0R0: recompute after 0I0, which needs it before",
    ),
    "recompute without a backward": (
        "0F0 0R0",
        1,
        1,
        "rank 0, position 1, 0R0: recompute without a backward that uses it",
    ),
    "recompute twice": ("0F0 0R0 0R0 0B0", 1, 1, "rank 0, position 2, 0R0: doubled"),
    "update in a synchronous window": (
        "0F0 0B0 0U0",
        1,
        1,
        "rank 0, position 2, 0U0: a synchronous window has no U: its updates follow the commit",
    ),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_a_trap_is_refused_with_its_place(trap: str):
    text, stages, microbatches, message = TRAPS[trap]
    assert str(refused(text, stages, microbatches)).startswith(f"table: {message}")


@pytest.mark.parametrize("action", [Action("X", 0, 0), Action("F", 0, 0), "0F0"])  # type: ignore[arg-type]
def test_an_unknown_action_is_refused(action: Any):
    schedule = Schedule("table", 1, 1, ((Action(ActionKind.FORWARD, 0, 0), action),))
    with pytest.raises(ScheduleError, match=r"rank 0, position 1, .*: unknown action: the kinds are F, B, I"):
        validate(schedule)


def test_negative_indices_are_refused():
    with pytest.raises(ScheduleError, match=r"0F-1: microbatch -1 is not in 0\.\.0"):
        validate(Schedule("table", 1, 1, ((Action(ActionKind.FORWARD, 0, -1),),)))
    with pytest.raises(ScheduleError, match=r"-1F0: stage -1 is not in 0\.\.0"):
        validate(Schedule("table", 1, 1, ((Action(ActionKind.FORWARD, -1, 0),),)))


def test_a_deadlock_is_told_as_a_circle():
    error = refused("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1", 2, 2)
    assert error.place == (0, 1)
    assert str(error) == (
        "table: rank 0, position 1, 0B0: deadlock:"
        " rank 0 stands at 0B0 (position 1) and waits for 1B0 (rank 1, position 2);"
        " rank 1 stands at 1F1 (position 1) and waits for 0F1 (rank 0, position 2)\n\n"
        "position    0      1    2    3\n"
        "  rank 0  0F0  >0B0<  0F1  0B1\n"
        "  rank 1  1F0  (1F1)  1B0  1B1"
    )


def test_a_deadlock_names_only_the_ranks_in_the_circle():
    """Rank 0 waits for the cycle but is not in it; rank 3 has finished."""
    error = refused(
        """
        0F0 0F1 0B0 0B1
        1F0 1B0 1F1 1B1
        2F0 2F1 2B0 2B1
        """,
        3,
        2,
    )
    assert "rank 1 stands at 1B0 (position 1) and waits for 2B0 (rank 2, position 2)" in str(error)
    assert "rank 2 stands at 2F1 (position 1) and waits for 1F1 (rank 1, position 2)" in str(error)
    assert "rank 0 stands" not in str(error)


def test_a_rank_can_lock_itself():
    error = refused("1F0 0F0 1B0 0B0", 2, 1)
    assert "rank 0 stands at 1F0 (position 0) and waits for 0F0 (rank 0, position 1)" in str(error)


def test_the_grid_marks_the_fault_and_what_it_is_held_against():
    error = refused("0F0 0F1 0B0 0B1\n1F1 1F0 1B0 1B1", 2, 2)
    assert error.place == (1, 1)
    assert str(error).split("\n\n")[1] == (
        "position      0      1    2    3\n  rank 0    0F0    0F1  0B0  0B1\n  rank 1  (1F1)  >1F0<  1B0  1B1"
    )


def test_the_grid_of_a_long_table_is_cut_around_the_place():
    forwards = [f"0F{index}" for index in range(60)]
    backwards = [f"0B{index}" for index in range(60)]
    backwards[30], backwards[31] = backwards[31], backwards[30]
    message = str(refused(" ".join(forwards + backwards), 1, 60))
    assert "rank 0, position 91, 0B30: comes after 0B31" in message
    assert "(0B31)  >0B30<" in message
    assert message.endswith("(part of 1 rank and 120 positions)")
    assert "0F0 " not in message
    assert max(map(len, message.split("\n\n")[1].splitlines())) < 110


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stages": 0}, "0 stages, needs at least 1"),
        ({"microbatches": 0}, "0 microbatches, needs at least 1"),
        ({"programs": ()}, "0 ranks, needs at least 1"),
        ({"programs": ((Action(ActionKind.FORWARD, 0, 0),), ())}, "rank 1 has no action"),
        ({"frozen_stages": 2}, "2 frozen stages, must lie in 0..1"),
        ({"frozen_stages": -1}, "-1 frozen stages, must lie in 0..1"),
    ],
)
def test_sizes_are_checked(fields: dict[str, Any], message: str):
    right = {"name": "x", "stages": 1, "microbatches": 1, "programs": ((Action(ActionKind.FORWARD, 0, 0),),)}
    with pytest.raises(ScheduleError, match=re.escape(message)):
        validate(Schedule(**{**right, **fields}))


FROZEN_FIRST = """
    0F0 0F1
    1F0 1B0 1F1 1B1
"""


def test_a_frozen_prefix_has_no_backward():
    validate(table(FROZEN_FIRST, 2, 2, frozen_stages=1))
    assert "rank 0, position 0, 0F0: its backward is missing" in str(refused(FROZEN_FIRST, 2, 2))


@pytest.mark.parametrize("token", ["0B0", "0I0", "0W0", "0R0"])
def test_an_action_of_the_frozen_prefix_other_than_forward_is_refused(token: str):
    error = refused(f"0F0 {token}\n1F0 1B0", 2, 1, frozen_stages=1)
    assert f"rank 0, position 1, {token}: stages 0..0 are frozen: they only go forward" in str(error)


def test_forwards_alone_are_a_window_with_all_stages_frozen():
    validate(table("0F0 0F1\n1F0 1F1", 2, 2, frozen_stages=2))


def test_an_asynchronous_window_may_update_and_need_not_ascend():
    text = "0F0 0F1 0B1 0U0 0B0 0U1"
    validate(table(text, 1, 2, synchronous=False))
    assert "comes before 0F1" in str(refused("0F0 0B1 0F1 0B0", 1, 2, synchronous=False))


def test_an_absurd_index_costs_no_time():
    assert "0F1 is missing" in str(refused("0F0 0B0 0F999999999999 0B999999999999", 1, 10**12))


def test_the_text_helper_reads_what_it_writes():
    assert lines(TWO_RANKS) == "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
