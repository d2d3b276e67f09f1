"""Tables that are mixed: their shares of any stretch, and each sample once before any twice."""

from __future__ import annotations

import pytest
from drawn_samples import drawn_places
from hypothesis import given
from hypothesis import strategies as st

from workers.data.mixture import Mixture
from workers.data.sampling import feistel_sample, train_indices

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=5)
WEIGHTS = st.floats(0.01, 100)


@st.composite
def mixtures(draw: st.DrawFn) -> Mixture:
    sizes = draw(SIZES)
    weights = draw(st.lists(WEIGHTS, min_size=len(sizes), max_size=len(sizes)))
    return Mixture(tuple(sizes), tuple(weights))


def table_of(mixture: Mixture, sample: int) -> tuple[int, int]:
    """(table, its sample)."""
    for number, size in enumerate(mixture.samples):
        if sample < size:
            return number, sample
        sample -= size
    raise AssertionError("no such sample")


@given(mixtures(), st.integers(0, 2**40), st.integers(0, 10**6))
def test_each_table_has_its_share_of_any_stretch(mixture: Mixture, seed: int, first: int) -> None:
    length = 200
    counts = [0] * len(mixture.samples)
    for position in range(first, first + length):
        counts[mixture.table(seed, position)[0]] += 1
    for count, weight in zip(counts, mixture.weights, strict=True):
        assert abs(count - length * weight / sum(mixture.weights)) <= len(counts) + 1


@given(mixtures(), st.integers(0, 2**40))
def test_each_sample_of_a_table_comes_once_before_any_twice(mixture: Mixture, seed: int) -> None:
    seen: dict[int, list[int]] = {}
    for position in range(150):
        passes, sample = mixture.place(seed, position, feistel_sample)
        table, own = table_of(mixture, sample)
        of_table = seen.setdefault(table, [])
        assert passes == len(of_table) // mixture.samples[table]
        of_table.append(own)
    for table, of_table in seen.items():
        size = mixture.samples[table]
        for start in range(0, len(of_table), size):
            passed = of_table[start : start + size]
            assert len({*passed}) == len(passed)


def test_a_position_is_the_same_however_a_step_is_cut() -> None:
    mixture = Mixture((20, 7), (1.0, 2.0))
    whole = drawn_places(3, 0, 0, 1, 48, mixture)
    assert [place for m in range(8) for place in drawn_places(3, 0, m, 8, 6, mixture)] == whole
    assert [
        place for s in range(4) for m in range(3) for place in drawn_places(3, s, m, 3, 4, mixture)
    ] == whole
    assert drawn_places(3, 1, 1, 2, 12, mixture) == whole[36:]
    assert [sample for _, sample in whole] == train_indices(3, 0, 0, 1, 48, mixture, "feistel")
    assert drawn_places(4, 0, 0, 1, 48, mixture) != whole


def test_weights_are_exact_and_tables_of_one_size_have_orders_of_their_own() -> None:
    mixture = Mixture((10, 10), (0.7, 0.3))
    tables = [mixture.table(5, position)[0] for position in range(1000)]
    assert tables.count(0) == 700
    assert all(tables[start : start + 10].count(1) == 3 for start in range(0, 1000, 10))
    order = [table_of(mixture, sample) for _, sample in drawn_places(5, 0, 0, 1, 60, mixture)]
    first, second = ([own for table, own in order if table == wanted][:10] for wanted in (0, 1))
    assert sorted(first) == sorted(second) == [*range(10)]
    assert first != second
    # The next pass is in another order.
    again = [own for table, own in order if table == 0][10:20]
    assert sorted(again) == [*range(10)]
    assert again != first


def test_these_samples_for_good() -> None:
    """A resumed job sees its samples in the same order under a later version."""
    found = train_indices(0, 0, 0, 1, 12, Mixture((5, 3), (1.0, 1.0)))
    assert found == [5, 3, 6, 4, 7, 1, 5, 2, 6, 0, 7, 3]


@pytest.mark.parametrize("weights", [(1e-9, 1.0), (1.0, 1e-9)])
def test_a_table_of_hardly_any_weight_hardly_ever_comes(weights: tuple[float, float]) -> None:
    mixture = Mixture((4, 4), weights)
    rare = weights.index(1e-9)
    assert sum(mixture.table(1, position)[0] == rare for position in range(1000)) <= 1
