"""The options for other numbers of ranks: the same family if it can use them all, else other families."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_profile import plan

from planner.schedule.registry import build
from planner.search.fallback_shapes import ShapeOptions, options


def names(
    first: str, ranks: int, *, counts: tuple[int, ...], microbatches: int, chunks: int = 1, replicas: int = 1
) -> ShapeOptions:
    own = plan(*counts, schedule=first, microbatches=microbatches, chunks=chunks, replicas=replicas)
    return options(own, build(first, own.pipeline_ranks, microbatches, chunks), ranks)


def test_the_same_family_on_fewer_ranks() -> None:
    found = names("1f1b", 3, counts=(2, 2, 2, 2), microbatches=8)
    assert [(option.pipelines, option.shape.name, option.shape.ranks) for option in found.best] == [
        (1, "1f1b", 3),
        (1, "1f1b", 2),
        (1, "1f1b", 1),
    ]
    assert found.why_not == ""


def test_another_family_where_the_own_cannot_use_all_ranks() -> None:
    found = names("interleaved", 3, counts=(1,) * 8, microbatches=8, chunks=2)
    assert [option.shape.ranks for option in found.own] == [2, 1]
    assert found.why_not == "interleaved on 3 ranks needs a multiple of 3 microbatches, and there are 8"
    assert {option.shape.name for option in found.best if option.shape.ranks == 3} == {
        "1f1b",
        "zb-h1",
        "zbv",
    }


def test_the_likest_family_comes_first() -> None:
    found = names("zbv", 3, counts=(1, 1, 1, 1), microbatches=4, chunks=2)
    # Four layers allow two ranks with two stages each, or three ranks with one stage each.
    assert [option.shape.ranks for option in found.own] == [2, 1]
    assert found.why_not == "zbv on 3 ranks has 6 stages, and the model has 4 layers"
    largest = [option.shape.name for option in found.others if option.ranks == 3]
    assert largest == ["zb-h1", "1f1b"]


def test_no_more_ranks_than_layers() -> None:
    found = names("1f1b", 9, counts=(1, 1, 1), microbatches=8)
    assert max(option.shape.ranks for option in found.best) == 3
    assert found.why_not == ""


def test_as_many_pipelines_as_replicas_at_most() -> None:
    found = names("1f1b", 5, counts=(2, 2), microbatches=8, replicas=2)
    pairs = {(option.pipelines, option.shape.ranks) for option in found.best}
    assert pairs == {(2, 2), (2, 1), (1, 4), (1, 3), (1, 2), (1, 1)}
    assert all(option.ranks <= 5 for option in found.best)


def test_a_table_of_the_users_own_has_the_ranks_that_it_has() -> None:
    table = replace(build("zb-h1", 2, 4), name="csv:mine.csv")
    own = replace(plan(2, 2, microbatches=4, replicas=2), schedule="csv:mine.csv")
    alone = options(own, table, 3)
    assert [(option.pipelines, option.shape.ranks) for option in alone.own] == [(1, 2)]
    assert alone.own[0].shape.schedule is table
    # Other families can use the third rank.
    assert alone.why_not == "its table is for 2 ranks, and there are 3"
    assert next(option.shape.name for option in alone.others if option.ranks == 3) == "zb-h1"
    assert options(own, table, 4).why_not == ""


@pytest.mark.parametrize("ranks", range(1, 10))
@pytest.mark.parametrize(
    ("first", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zbv", 2)]
)
def test_all_that_is_offered_can_be_built(first: str, chunks: int, ranks: int) -> None:
    found = names(first, ranks, counts=(1,) * (4 * chunks), microbatches=8, chunks=chunks, replicas=3)
    assert found.best
    for option in (*found.own, *found.others):
        assert option.ranks <= ranks
        assert option.pipelines <= 3
        assert option.shape.schedule.stages <= 4 * chunks
        assert option.shape.schedule.microbatches == 8
