"""Explicit partition: the user's own number of layers per stage."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from planner.wording import counted


def partition(layer_counts: Sequence[int], layers: int, stages: int) -> tuple[tuple[int, int], ...]:
    """The layers of each stage as [first, stop), from counts such as [2, 3, 3, 2].

    Raises:
        ValueError: not one count per stage, a stage with no layer, or counts that do not sum to `layers`.
    """
    counts = list(layer_counts)
    if len(counts) != stages:
        raise ValueError(
            f"partition {counts} names {counted(len(counts), 'stage')}, but ranks x chunks make {stages}:"
            " give one layer count per stage"
        )
    if any(count < 1 for count in counts):
        raise ValueError(f"partition {counts} has a stage with no layer: every stage needs at least one")
    if sum(counts) != layers:
        raise ValueError(
            f"partition {counts} covers {counted(sum(counts), 'layer')}, but the model has {layers}"
            " (embedding and head are layers too)"
        )
    return tuple(pairwise([0, *accumulate(counts)]))
