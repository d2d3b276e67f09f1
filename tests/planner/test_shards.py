"""Which parameters of a layer each shard has: all of them once, evenly, and those that are shared in one shard."""

from __future__ import annotations

from itertools import combinations_with_replacement

from hypothesis import given
from hypothesis import strategies as st

from planner.shards import Piece, Shard, cut, kept_whole, made_of, made_with_weights

SIZES = st.lists(st.integers(0, 40), max_size=7)


def largest(sizes: list[int], runs: tuple[tuple[int, int], ...]) -> int:
    return max(sum(sizes[first:stop]) for first, stop in runs)


@given(SIZES, st.integers(0, 9), st.integers(1, 5))
def test_every_parameter_is_in_one_shard_and_no_cut_is_more_even(
    sizes: list[int], layer: int, of: int
) -> None:
    runs = cut(sizes, layer, of)
    assert len(runs) == of
    assert sorted(n for first, stop in runs for n in range(first, stop)) == list(range(len(sizes)))
    others = [
        tuple(zip((0, *ends), (*ends, len(sizes)), strict=True))
        for ends in combinations_with_replacement(range(len(sizes) + 1), of - 1)
    ]
    assert largest(sizes, runs) == min(largest(sizes, other) for other in others)


def test_the_larger_runs_go_round_from_layer_to_layer() -> None:
    runs = [cut([9, 1, 1], layer, 3) for layer in range(3)]
    assert runs[0] == ((0, 1), (1, 3), (3, 3))
    assert [[stop - first for first, stop in each] for each in runs] == [[1, 2, 0], [0, 1, 2], [2, 0, 1]]


def test_layers_that_share_parameters_are_whole_in_one_shard() -> None:
    """Layers 1 and 5 share one, 5 and 7 another, 2 and 4 a third."""
    assert kept_whole([[1, 5], [2, 4], [7, 5]], 2) == {1: 1, 5: 1, 7: 1, 2: 0, 4: 0}
    assert kept_whole([], 4) == {}
    assert cut([3, 3], 5, 3, whole_at=1) == ((0, 0), (0, 2), (0, 0))


def test_a_layer_is_made_of_one_piece_or_of_all_shards_of_one_cut() -> None:
    thirds = [Piece(4, Shard(number, 3)) for number in range(3)]
    halves = [Piece(4, Shard(number, 2)) for number in range(2)]
    others = [Piece(5), Piece(3, Shard(0, 2))]
    assert made_of(4, {*thirds, halves[1], *others}) == tuple(thirds)
    assert made_of(4, {*thirds, *halves}) == tuple(halves)
    assert made_of(4, {*thirds, *halves, Piece(4)}) == (Piece(4),)
    assert made_of(4, {*thirds[:2], halves[0], *others}) == ()


def test_where_only_weights_are_left_as_many_shards_as_can_be_are_complete() -> None:
    thirds = [Piece(4, Shard(number, 3)) for number in range(3)]
    halves = [Piece(4, Shard(number, 2)) for number in range(2)]
    assert made_with_weights(4, {halves[0]}, {Piece(4), halves[1]}) == tuple(halves)
    assert made_with_weights(4, {halves[0], *thirds[:2]}, {*halves, thirds[2]}) == tuple(thirds)
    assert made_with_weights(4, {*thirds, halves[0]}, {Piece(4), halves[1]}) == tuple(thirds)
    assert made_with_weights(4, {halves[0], thirds[0]}, {Piece(4), Piece(5)}) == (Piece(4),)
    assert made_with_weights(4, {halves[0], Piece(5)}, {*thirds[:2], Piece(5)}) == ()
