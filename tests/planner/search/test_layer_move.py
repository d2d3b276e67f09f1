"""A run of layers goes to the stage beside it; what cannot be is said with what can."""

from __future__ import annotations

from dataclasses import replace

import pytest
import small_profile

from planner.plan import PlanError
from planner.search.layer_move import parse_layers, with_layers

PLAN = small_profile.plan(2, 3, 3, 1)


@pytest.mark.parametrize(
    ("first", "stop", "rank", "layers"),
    [
        (4, 5, 2, ((0, 2), (2, 4), (4, 8), (8, 9))),
        (3, 5, 2, ((0, 2), (2, 3), (3, 8), (8, 9))),
        (5, 7, 1, ((0, 2), (2, 7), (7, 8), (8, 9))),
        (2, 3, 0, ((0, 3), (3, 5), (5, 8), (8, 9))),
    ],
)
def test_layers_go_to_the_stage_beside_them(
    first: int, stop: int, rank: int, layers: tuple[tuple[int, int], ...]
) -> None:
    assert with_layers(PLAN, first, stop, rank) == replace(PLAN, layers=layers)


@pytest.mark.parametrize(
    ("first", "stop", "rank", "told"),
    [
        (9, 10, 0, "there is no layer 9: the model has layers 0 to 8"),
        (4, 5, 4, "there is no place 4 in the pipeline: it has places 0 to 3"),
        (5, 8, 2, "layers 5 to 7 are at that rank already"),
        (3, 4, 2, "The rank holds layers 5 to 7 and can take layers 3 to 4 or the last of them"),
        (2, 5, 2, "none may be left empty"),
        (8, 9, 2, "can take layers 3 to 4 or the last of them"),
        (5, 6, 0, "The rank holds layers 0 to 1 and can take layers 2 to 3 or the first of them"),
        (0, 1, 3, "The rank holds layer 8 and can take layers 6 to 7 or the last of them"),
    ],
)
def test_what_cannot_be_is_said_with_what_can(first: int, stop: int, rank: int, told: str) -> None:
    with pytest.raises(PlanError) as refused:
        with_layers(PLAN, first, stop, rank)
    assert told in str(refused.value)


@pytest.mark.parametrize(("text", "span"), [("3", (3, 4)), ("3-4", (3, 5)), (" 0-11 ", (0, 12))])
def test_layers_as_people_write_them(text: str, span: tuple[int, int]) -> None:
    assert parse_layers(text) == span


@pytest.mark.parametrize("text", ["", "3,4", "x", "4-3", "-1"])
def test_no_layers(text: str) -> None:
    with pytest.raises(PlanError, match="range of layers"):
        parse_layers(text)
