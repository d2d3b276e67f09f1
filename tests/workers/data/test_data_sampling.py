"""Which samples a microbatch uses: each epoch covers each sample once, whatever the number of replicas."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.data.sampling import (
    epoch_permutation,
    feistel_sample,
    samples_at,
    train_indices,
    validation_indices,
    validation_samples,
)


def stream(length: int, *, seed: int, total: int, size: int, samples: int) -> list[int]:
    """The first `length` samples of a job, step by step, microbatch by microbatch."""
    taken: list[int] = []
    step = 0
    while len(taken) < length:
        for microbatch in range(total):
            taken += train_indices(seed, step, microbatch, total, size, samples)
        step += 1
    return taken[:length]


@pytest.mark.parametrize(
    ("samples", "total", "size"), [(12, 4, 3), (13, 4, 3), (97, 8, 4), (5, 4, 4), (1, 2, 2), (64, 1, 1)]
)
def test_every_epoch_uses_every_sample_once(samples: int, total: int, size: int) -> None:
    epochs = 5
    taken = stream(epochs * samples, seed=3, total=total, size=size, samples=samples)
    for epoch in range(epochs):
        chunk = taken[epoch * samples : (epoch + 1) * samples]
        assert sorted(chunk) == list(range(samples))
        assert chunk == epoch_permutation(3, epoch, samples).tolist()


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(epoch_permutation(seed, epoch, 50).tolist()) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


@pytest.mark.parametrize("samples", [7, 1000])
def test_two_replicas_are_one_with_twice_the_microbatches(samples: int) -> None:
    microbatches, size = 4, 3
    for step in range(6):
        replicas = [
            [train_indices(0, step, r * microbatches + m, 2 * microbatches, size, samples) for m in range(4)]
            for r in range(2)
        ]
        doubled = [train_indices(0, step, g, 8, size, samples) for g in range(8)]
        assert replicas[0] + replicas[1] == doubled


def test_microbatches_of_another_size_cut_the_same_stream() -> None:
    assert stream(240, seed=1, total=4, size=6, samples=50) == stream(
        240, seed=1, total=8, size=3, samples=50
    )


def test_the_order_is_pinned() -> None:
    """Changing these numbers would break the trajectory of every job that resumes."""
    assert train_indices(0, 0, 0, 1, 8, 10) == [0, 2, 9, 1, 8, 5, 4, 3]
    assert train_indices(42, 1, 3, 4, 2, 11) == [5, 3]


def test_it_is_the_same_in_a_fresh_process_and_without_torch() -> None:
    code = (
        "import sys; from workers.data.sampling import train_indices;"
        "print(train_indices(9, 5, 2, 4, 8, 1000)); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == str(samples_at(9, range(176, 184), 1000))


def test_indices_are_plain_integers_and_the_cache_cannot_be_spoilt() -> None:
    assert all(type(index) is int for index in train_indices(0, 0, 0, 1, 4, 9))
    with pytest.raises(ValueError, match="read-only"):
        epoch_permutation(0, 0, 9)[0] = 1
    assert epoch_permutation(0, 0, 9) is epoch_permutation(0, 0, 9)


@pytest.mark.parametrize("samples", [1, 2, 3, 4, 5, 7, 16, 17, 100, 1001, 4096, 4097])
@pytest.mark.parametrize("epoch", [0, 1])
def test_feistel_visits_each_sample_once(samples: int, epoch: int) -> None:
    order = [feistel_sample(9, epoch, offset, samples) for offset in range(samples)]
    assert sorted(order) == [*range(samples)]
    if samples > 100:
        assert order != [feistel_sample(9, 2, offset, samples) for offset in range(samples)]
        assert order != [feistel_sample(8, epoch, offset, samples) for offset in range(samples)]
        # As far apart as places drawn at random: a third of all on average.
        jumps = [abs(one - other) for one, other in pairwise(order)]
        assert samples * 0.3 < sum(jumps) / len(jumps) < samples * 0.37


@given(st.integers(1, 10**12), st.integers(0, 2**40), st.integers(0, 5), st.integers(0, 10**6))
def test_feistel_stays_within_the_samples_of_any_number(samples: int, seed: int, epoch: int, at: int) -> None:
    assert 0 <= feistel_sample(seed, epoch, at % samples, samples) < samples


def test_a_stream_in_the_order_of_feistel_goes_on_from_epoch_to_epoch() -> None:
    taken = [
        index
        for step in range(10)
        for g in range(2)
        for index in train_indices(5, step, g, 2, 3, 20, "feistel")
    ]
    for epoch in range(3):
        assert sorted(taken[20 * epoch : 20 * epoch + 20]) == [*range(20)]
    assert taken[:20] != taken[20:40]


def test_large_seeds_are_taken() -> None:
    assert sorted(epoch_permutation(2**63 + 1, 0, 5).tolist()) == [0, 1, 2, 3, 4]
    assert not np.array_equal(epoch_permutation(2**63, 0, 99), epoch_permutation(2**63 + 1, 0, 99))


@pytest.mark.parametrize(
    ("samples", "at_most", "taken"), [(0, None, 0), (5, None, 5), (19, None, 19), (19, 2, 16), (9, 4, 9)]
)
def test_a_validation_takes_all_samples_or_those_of_some_windows(
    samples: int, at_most: int | None, taken: int
) -> None:
    assert validation_samples(samples, 8, at_most) == taken


@pytest.mark.parametrize("samples", [1, 5, 6, 30, 31])
def test_validation_is_in_order_and_takes_each_sample_once(samples: int) -> None:
    taken = [
        index for position in range(-(-samples // 3)) for index in validation_indices(position, 3, samples)
    ]
    assert taken == [*range(samples)]
