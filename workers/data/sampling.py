"""Samples of a microbatch, as a pure function of seed and position. No other place decides them.

Training walks one endless stream, epoch after epoch, each epoch a permutation of all samples. The course of the job's
batch (`planner/course.py`) says which positions of it a step's global microbatch g = replica * M + microbatch takes:
two replicas are one with twice the microbatches. Knows nothing of data.

An epoch's order is an array of all samples (`permutation`), or is computed sample by sample (`feistel`), which takes no
memory however many there are. Where tables are mixed, `mixture.py` says which of them a position takes, and where
replicas draw from parts of the samples, `buckets.py` says from which.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.random import Philox
from numpy.typing import NDArray

from workers.data.buckets import Buckets
from workers.data.mixture import Mixture
from workers.protocol.section import Shuffle

SampleStream = int | Mixture | Buckets
"""Training samples in the order of an endless stream: so many in turn, those of tables that are mixed, or those of
parts."""

LARGE = 10_000_000
"""Samples from which on a job that names no order has that of `feistel`."""
_ROUNDS = 8
_WORD = (1 << 64) - 1


def samples_at(
    seed: int, positions: Iterable[int], samples: SampleStream, shuffle: Shuffle | None = None
) -> list[int]:
    """The training samples at these positions, in order; the arguments are those of `train_places`."""
    return [sample for _, sample in train_places(seed, positions, samples, shuffle)]


def train_indices(
    seed: int,
    step: int,
    microbatch: int,
    microbatches_total: int,
    microbatch_size: int,
    samples: SampleStream,
    shuffle: Shuffle | None = None,
) -> list[int]:
    """The training samples of one microbatch, in order, where the batch keeps its size; for loops without a job.

    Args:
        seed, samples, shuffle: those of `train_places`.
        step: from 0.
        microbatch: the global one, in [0, microbatches_total).
        microbatches_total: microbatches of all replicas in one step, R * M.
        microbatch_size: samples per microbatch.
    """
    first = (step * microbatches_total + microbatch) * microbatch_size
    return samples_at(seed, range(first, first + microbatch_size), samples, shuffle)


def train_places(
    seed: int, positions: Iterable[int], samples: SampleStream, shuffle: Shuffle | None = None
) -> list[tuple[int, int]]:
    """(epoch, training sample) at each of these positions of the stream, in order.

    Args:
        seed: at least 0.
        positions: those of a microbatch, as `Course.positions` has them.
        samples: how many training samples there are, which may be fewer than one step needs; or the tables that are
            mixed, or the parts that replicas draw from, whose order is that of `feistel` in any case, and which count
            epochs each for itself.
        shuffle: the order within an epoch; None: `permutation`.
    """
    places = []
    for position in positions:
        if not isinstance(samples, int):
            places.append(samples.place(seed, position, feistel_sample))
            continue
        epoch, offset = divmod(position, samples)
        if shuffle == "feistel":
            places.append((epoch, feistel_sample(seed, epoch, offset, samples)))
        else:
            places.append((epoch, int(epoch_permutation(seed, epoch, samples)[offset])))
    return places


def samples_digest(microbatches: Mapping[int, Sequence[int]]) -> str:
    """sha256 (hex) of what a step used: the samples of each global microbatch, in order of microbatch."""
    used = [[microbatch, *indices] for microbatch, indices in sorted(microbatches.items())]
    return hashlib.sha256(json.dumps(used, separators=(",", ":")).encode()).hexdigest()


@lru_cache(maxsize=2)  # a step at the turn of an epoch needs two; each may be large
def epoch_permutation(seed: int, epoch: int, samples: int) -> NDArray[np.intp]:
    """The order in which `epoch` visits the samples: [samples] integers, read-only.

    Sorts the raw Philox stream (Salmon et al. 2011) keyed by (seed, epoch). NumPy promises that stream for
    good, unlike what `Generator.permutation` makes of it: a resumed job sees its samples in the same order
    under a newer NumPy.
    """
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    order = np.argsort(Philox(key=key).random_raw(samples), kind="stable")
    order.flags.writeable = False
    return order


def feistel_sample(seed: int, epoch: int, offset: int, samples: int) -> int:
    """The sample that `epoch` visits at `offset`, both in [0, samples): a permutation without an array.

    A Feistel network (Luby and Rackoff 1988) of 8 rounds permutes the least square of a power of two that holds all
    samples, a quarter of which they fill at least; what falls outside of them is permuted again until it does not
    (cycle walking, Black and Rogaway 2002).
    """
    half = max(1, -(-(samples - 1).bit_length() // 2))
    mask = (1 << half) - 1
    found = offset
    while True:
        left, right = found >> half, found & mask
        for key in _round_keys(seed, epoch):
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        found = left << half | right
        if found < samples:
            return found


@lru_cache(maxsize=64)  # two of each table that is mixed
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    digest = hashlib.blake2b(json.dumps(["feistel", seed, epoch]).encode(), digest_size=8 * _ROUNDS).digest()
    return tuple(int.from_bytes(digest[8 * n : 8 * n + 8], "little") for n in range(_ROUNDS))


def _mixed(word: int) -> int:
    """The finalizer of MurmurHash3 (Appleby 2011) for 64 bits."""
    word = (word ^ word >> 33) * 0xFF51AFD7ED558CCD & _WORD
    word = (word ^ word >> 33) * 0xC4CEB9FE1A85EC53 & _WORD
    return word ^ word >> 33


def validation_samples(samples: int, per_window: int, at_most: int | None) -> int:
    """Number of the `samples` held-out ones in one validation: all, or those of `at_most` windows of `per_window`."""
    return samples if at_most is None else min(samples, at_most * per_window)


def validation_indices(position: int, microbatch_size: int, samples: int) -> list[int]:
    """The held-out samples of the microbatch at `position` of a validation of `samples`, in order. The last one may be
    smaller."""
    first = position * microbatch_size
    return list(range(first, min(first + microbatch_size, samples)))
