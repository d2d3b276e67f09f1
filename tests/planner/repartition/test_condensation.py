"""A condensed model has the long layers alone, and no block that is too long for an even cut."""

from __future__ import annotations

import numpy as np
import pytest

from planner.repartition.condensation import MOST_UNMERGED, PER_STAGE, condense

LAYERS, STAGES = 400, 8


def test_the_longest_layers_stay_alone_and_the_others_merge() -> None:
    compute_s, message_s = [1.0] * LAYERS, [0.0] * LAYERS
    compute_s[100] = 30.0
    message_s[200] = 20.0
    blocks = condense(compute_s, message_s, STAGES, pivotal=2)
    assert {(100, 101), (200, 201)} <= set(blocks)
    assert len(blocks) < LAYERS / 8
    _check(blocks, compute_s)


@pytest.mark.parametrize("seed", range(20))
def test_blocks_are_all_layers_in_order_and_none_is_too_long(seed: int) -> None:
    rng = np.random.default_rng(seed)
    compute_s = (rng.exponential(1.0, LAYERS) ** rng.uniform(0, 3)).tolist()
    apart = rng.integers(1, LAYERS, 5).tolist()
    blocks = condense(compute_s, rng.uniform(0, 1, LAYERS).tolist(), STAGES, apart=apart)
    assert set(apart) <= {first for first, _ in blocks}
    _check(blocks, compute_s)


def test_a_block_ends_where_the_message_is_cheap() -> None:
    message_s = [1.0 if layer % 7 else 0.1 for layer in range(LAYERS)]
    blocks = condense([1.0] * LAYERS, message_s, STAGES, pivotal=0)
    assert all((stop - 1) % 7 == 0 for _, stop in blocks[:-1])


def test_a_model_of_few_layers_is_not_condensed() -> None:
    few = MOST_UNMERGED * STAGES
    assert condense([1.0] * few, [0.0] * few, STAGES) == tuple((layer, layer + 1) for layer in range(few))
    with pytest.raises(ValueError, match="3 layers have times, and 2 have messages"):
        condense([1.0] * 3, [0.0] * 2, 2)


def _check(blocks: tuple[tuple[int, int], ...], compute_s: list[float]) -> None:
    assert [first for first, _ in blocks] == [0, *(stop for _, stop in blocks[:-1])]
    assert blocks[-1][1] == LAYERS
    limit_s = sum(compute_s) / (PER_STAGE * STAGES)
    assert all(sum(compute_s[first:stop]) <= limit_s or stop == first + 1 for first, stop in blocks)
