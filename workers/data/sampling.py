"""Samples of a microbatch, as a pure function of seed and position. No other place decides them.

Training walks one endless stream, epoch after epoch, each epoch a permutation of all samples. Microbatch g
of step t takes `microbatch_size` samples from position (t * microbatches_total + g) * microbatch_size on,
where g = replica * M + microbatch and microbatches_total = R * M: two replicas are one with twice the
microbatches. Knows nothing of data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.random import Philox
from numpy.typing import NDArray


def train_indices(
    seed: int, step: int, microbatch: int, microbatches_total: int, microbatch_size: int, samples: int
) -> list[int]:
    """The training samples of one microbatch, in order.

    Args:
        seed: at least 0.
        step: from 0.
        microbatch: the global one, in [0, microbatches_total).
        microbatches_total: microbatches of all replicas in one step, R * M.
        microbatch_size: samples per microbatch.
        samples: how many training samples there are; may be fewer than one step needs.
    """
    first = (step * microbatches_total + microbatch) * microbatch_size
    indices = []
    for position in range(first, first + microbatch_size):
        epoch, offset = divmod(position, samples)
        indices.append(int(epoch_permutation(seed, epoch, samples)[offset]))
    return indices


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


def validation_windows(samples: int, per_window: int, at_most: int) -> int:
    """Number of windows of `per_window` samples in one validation: whole ones, at most `at_most`.

    One, which `validation_indices` fills by starting over, where the held-out samples are fewer than a
    window; none where there are none.
    """
    if samples == 0:
        return 0
    return max(1, min(at_most, samples // per_window))


def validation_indices(
    window: int, microbatch: int, microbatches_total: int, microbatch_size: int, samples: int
) -> list[int]:
    """The held-out samples of one microbatch of validation window `window`, in order; wraps at the end.

    The arguments are those of `train_indices`, with `samples` the held-out ones.
    """
    first = (window * microbatches_total + microbatch) * microbatch_size
    return [position % samples for position in range(first, first + microbatch_size)]
