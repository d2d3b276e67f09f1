import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.ir import Action, ActionKind, Schedule


@given(kind=st.sampled_from(ActionKind), stage=st.integers(0, 10**6), index=st.integers(0, 10**6))
def test_a_token_round_trips(kind: ActionKind, stage: int, index: int):
    action = Action(kind, stage, index)
    assert Action.parse(str(action)) == action


def test_tokens_read_as_in_pytorch():
    assert Action.parse("2F0") == Action(ActionKind.FORWARD, 2, 0)
    assert Action.parse(" 3I4 ") == Action(ActionKind.INPUT_GRAD, 3, 4)
    assert str(Action(ActionKind.WEIGHT_GRAD, 1, 7)) == "1W7"


@pytest.mark.parametrize(
    "token", ["2F0x", "x2F0", "2F", "F0", "2f0", "2X0", "-1F0", "2F-1", "2 F0", "2F0 2F1", "", "٢F0", "2F1.0"]
)
def test_the_whole_token_must_match(token: str):
    with pytest.raises(ValueError, match="is not an action: expected <stage><kind><microbatch>"):
        Action.parse(token)


def test_the_placement_follows_from_the_programs():
    schedule = Schedule("x", 3, 1, ((Action.parse("0F0"), Action.parse("2F0")), (Action.parse("1F0"),)))
    assert schedule.rank_of_stage == {0: 0, 2: 0, 1: 1}
    assert schedule.stages_of_rank(0) == (0, 2)
    assert schedule.ranks == 2
