"""PipeTransformer's Algorithm 1, as corrected: NOTES' values, and cuts that cover every layer once."""

import random
from itertools import pairwise

import pytest

from planner.partition.pipetransformer import compressed, counted_sizes, partition

LAMBDA = 1 / 6


def largest(layers: int, stages: int, frozen: int) -> float:
    """The largest stage's size, of equal layers."""
    sizes = counted_sizes([1.0] * layers, frozen=frozen, frozen_cost=LAMBDA)
    cut = partition([1.0] * layers, stages, frozen=frozen, frozen_cost=LAMBDA)
    return max(sum(sizes[first:stop]) for first, stop in cut)


def test_eight_ranks_are_halved_at_six_and_at_nine_tenths_and_never_to_one() -> None:
    """NOTES: with lambda 1/6 and by sizes, from K = 8, at 0.6 and 0.9 of the layers frozen; the paper reaches 1."""
    layers, begun = 120, largest(120, 8, 0)
    halved = {
        frozen: compressed(
            8, lambda ranks, frozen=frozen: largest(layers, ranks, frozen) <= begun * (1 + 1e-9)
        )
        for frozen in range(layers)
    }
    assert [halved[frozen] for frozen in (0, 71, 72, 107, 108, 119)] == [8, 8, 4, 4, 2, 2]
    assert sorted(halved.values(), reverse=True) == list(halved.values())


def test_equal_layers_are_shared_out_equally() -> None:
    """The paper's strict comparison strands a layer where all are equal."""
    assert partition([1.0] * 12, 4) == ((0, 3), (3, 6), (6, 9), (9, 12))


def test_frozen_layers_lie_on_the_first_stage_as_far_as_they_are_its_part() -> None:
    assert partition([1.0] * 12, 4, frozen=6, frozen_cost=LAMBDA) == ((0, 6), (6, 8), (8, 10), (10, 12))


@pytest.mark.parametrize("seed", range(40))
def test_every_layer_is_in_one_stage_and_no_stage_is_empty(seed: int) -> None:
    draw = random.Random(seed)
    layers = draw.randint(1, 40)
    stages, frozen = draw.randint(1, layers), draw.randint(0, layers - 1)
    sizes = [draw.choice((0.0, 1.0, draw.random() * 10)) for _ in range(layers)]
    cut = partition(sizes, stages, frozen=frozen, frozen_cost=draw.random())
    assert len(cut) == stages
    assert (cut[0][0], cut[-1][1]) == (0, layers)
    assert all(first < stop for first, stop in cut)
    assert all(before[1] == after[0] for before, after in pairwise(cut))


def test_an_odd_pipeline_is_halved_to_the_smaller_half() -> None:
    assert compressed(7, lambda ranks: True) == 1
    assert compressed(7, lambda ranks: ranks >= 3) == 3
    assert compressed(7, lambda ranks: False) == 7


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="3 stages"):
        partition([1.0, 1.0], 3)
