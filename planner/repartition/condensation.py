"""Condenses a model to blocks: runs of layers that a search does not divide (DynPipe, section V-B1).

The paper's blocks lie around the layers that take the most time. In a model of equal layers, those would be arbitrary
ones, and the other blocks too long for any even cut. So the longest layers stay alone, and the others merge to blocks
of at most a share of a mean stage, which end where messages are cheap. Knows no schedule.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

import numpy as np

Blocks = tuple[tuple[int, int], ...]
"""[first, stop) of each, in order; together they are all layers."""

PER_STAGE = 3
"""Blocks into which a mean stage is divided, at least."""
MOST_UNMERGED = 8
"""Layers for each stage up to which none are merged."""
PIVOTAL_PER_STAGE = 1
"""Longest layers that stay alone, for each stage."""


def condense(
    compute_s: Sequence[float],
    message_s: Sequence[float],
    stages: int,
    *,
    pivotal: int | None = None,
    apart: Collection[int] = (),
) -> Blocks:
    """The blocks of a model that is cut into `stages` stages. A model of few layers has one layer in each.

    Args:
        compute_s: per layer, seconds of one microbatch.
        message_s: per layer, seconds of the messages over the cut behind it; that of the last layer counts for nothing.
        pivotal: layers that stay alone, those with the most computation and messages; None: `PIVOTAL_PER_STAGE` for
            each stage.
        apart: layers before which a block must begin, such as where the present plan cuts.

    Raises:
        ValueError: not one time of each kind per layer.
    """
    layers = len(compute_s)
    if len(message_s) != layers:
        raise ValueError(f"{layers} layers have times, and {len(message_s)} have messages")
    if layers <= MOST_UNMERGED * stages:
        return tuple((layer, layer + 1) for layer in range(layers))
    own = np.asarray(compute_s, dtype=np.float64)
    count = PIVOTAL_PER_STAGE * stages if pivotal is None else pivotal
    longest = np.argsort(-(own + np.asarray(message_s)), kind="stable")[:count]
    alone = {int(layer) for layer in longest}
    limit_s = float(own.sum()) / (PER_STAGE * stages)
    forced = {0, layers, *apart} | alone | {layer + 1 for layer in alone}
    bounds = sorted(forced)
    inner: list[int] = []
    for first, stop in pairwise(bounds):
        if first not in alone:
            inner += _within(compute_s[first:stop], message_s[first:stop], first, limit_s)
    return tuple(pairwise(sorted({*bounds, *inner})))


def _within(compute_s: Sequence[float], message_s: Sequence[float], first: int, limit_s: float) -> list[int]:
    """Where to divide a run of layers: each block takes at most `limit_s` if it has several layers, and ends in the
    second half of that where the message is cheapest."""
    cuts: list[int] = []
    begin = 0
    while True:
        taken_s, stop = 0.0, begin
        while stop < len(compute_s) and (stop == begin or taken_s + compute_s[stop] <= limit_s):
            taken_s += compute_s[stop]
            stop += 1
        if stop == len(compute_s):
            return cuts
        candidates = range(begin + (stop - begin + 1) // 2, stop + 1)
        begin = min(candidates, key=lambda cut: (message_s[cut - 1], -cut))
        cuts.append(first + begin)
