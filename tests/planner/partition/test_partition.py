import re
from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.partition import explicit, parameter


def sizes(counts: Sequence[int], ranges: Sequence[tuple[int, int]]) -> list[int]:
    return [sum(counts[first:stop]) for first, stop in ranges]


@pytest.mark.parametrize(
    ("counts", "stages", "expected"),
    [
        ([5], 1, ((0, 1),)),
        ([1] * 8, 4, ((0, 2), (2, 4), (4, 6), (6, 8))),
        # Ties with equal squares: fewest layers first.
        ([1] * 10, 4, ((0, 2), (2, 4), (4, 7), (7, 10))),
        # A heavy head determines the largest stage; the rest is still balanced.
        ([1, 1, 1, 1, 100], 3, ((0, 2), (2, 4), (4, 5))),
        ([100, 1, 1, 1, 1], 3, ((0, 1), (1, 3), (3, 5))),
        # Layers without parameters.
        ([0, 0, 0], 2, ((0, 1), (1, 3))),
        ([9, 0, 0, 9], 4, ((0, 1), (1, 2), (2, 3), (3, 4))),
        # Embedding, eight blocks, head.
        ([32, 12, 12, 12, 12, 12, 12, 12, 12, 32], 4, ((0, 2), (2, 5), (5, 8), (8, 10))),
    ],
)
def test_parameter_partition(counts: list[int], stages: int, expected: tuple[tuple[int, int], ...]):
    assert parameter.partition(counts, stages) == expected


@given(counts=st.lists(st.integers(0, 30), min_size=1, max_size=9), data=st.data())
@settings(max_examples=150, deadline=None)
def test_parameter_partition_is_the_best_of_all_cuts(counts: list[int], data: st.DataObject):
    stages = data.draw(st.integers(1, len(counts)))
    cuts = [
        tuple(pairwise([0, *inner, len(counts)])) for inner in combinations(range(1, len(counts)), stages - 1)
    ]

    def cost(ranges: tuple[tuple[int, int], ...]) -> tuple[int, int, tuple[int, ...]]:
        each = sizes(counts, ranges)
        return max(each), sum(size * size for size in each), tuple(stop for _, stop in ranges)

    assert parameter.partition(counts, stages) == min(cuts, key=cost)


def test_parameter_partition_of_many_layers():
    ranges = parameter.partition([7, 3] * 200, 32)
    assert len(ranges) == 32
    assert max(sizes([7, 3] * 200, ranges)) == 67


@pytest.mark.parametrize("stages", [0, 4])
def test_more_stages_than_layers_are_refused(stages: int):
    with pytest.raises(ValueError, match=f"cannot cut 3 layers into {stages} stages .* use at most 3 stages"):
        parameter.partition([1, 2, 3], stages)


def test_explicit_partition():
    assert explicit.partition([2, 3, 3, 2], 10, 4) == ((0, 2), (2, 5), (5, 8), (8, 10))
    assert explicit.partition((4,), 4, 1) == ((0, 4),)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([2, 3, 3], "partition [2, 3, 3] names 3 stages, but ranks x chunks make 4"),
        ([2, 3, 3, 3], "partition [2, 3, 3, 3] covers 11 layers, but the model has 10"),
        ([2, 3, 3, 1], "partition [2, 3, 3, 1] covers 9 layers, but the model has 10"),
        ([5, 0, 3, 2], "partition [5, 0, 3, 2] has a stage with no layer"),
        ([7, -2, 3, 2], "partition [7, -2, 3, 2] has a stage with no layer"),
    ],
)
def test_an_explicit_partition_that_does_not_cover_is_refused(counts: list[int], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        explicit.partition(counts, 10, 4)
