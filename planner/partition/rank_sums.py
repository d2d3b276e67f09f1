"""Exact search for the smallest bottleneck where ranks hold several stages, whose times add up.

A dynamic program over stages sees one stage at a time. This search keeps the busy time of each rank and link for every
partial cut, and drops partial cuts that cannot beat the known cut.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import comb

import numpy as np
from numpy.typing import NDArray

from planner.partition.stage_costs import Matrix, Ranges, StageCosts, Vector

MOST_CUTS = 250_000
"""Models with more cuts are not searched: 24 layers in 8 stages have 245,157."""
_ROUNDING = 1e-12
"""Relative: sums in different orders differ by less."""

Layers = NDArray[np.int64]
"""Per partial cut, the layer before which it cuts."""


def searchable(costs: StageCosts) -> bool:
    """Whether some rank holds several stages, and there are at most `MOST_CUTS` cuts."""
    several = len(set(costs.stage_ranks)) < costs.stages
    return several and comb(costs.layers - 1, costs.stages - 1) <= MOST_CUTS


class RankSums:
    """The busy times of a pipeline's ranks and links for one microbatch.

    Args:
        rank_s: stage -> seconds that each layer range, as that stage, keeps its rank busy, messages included.
    """

    def __init__(self, costs: StageCosts, rank_s: Callable[[int], Matrix]) -> None:
        self._costs = costs
        self._rank_s = [rank_s(stage) for stage in range(costs.stages)]
        ranks = costs.stage_ranks
        self._ranks = max(ranks) + 1
        pairs = {(a, b) for a, b in pairwise(ranks) if a != b}
        pairs |= {(b, a) for a, b in pairs}
        self._columns = {pair: self._ranks + number for number, pair in enumerate(sorted(pairs))}

    def slowest_s(self, ranges: Ranges) -> float:
        """Busy time of the busiest rank or link of a cut."""
        busy_s = self._idle(1)
        for stage, (first, stop) in enumerate(ranges):
            self._add(busy_s, stage, np.array([first]), np.array([stop]))
        return float(busy_s.max())

    def least(self, allowed: Callable[[int], NDArray[np.bool_]], known: Ranges) -> Ranges:
        """The cut that minimizes the busiest rank or link; of those, the one with the least sum of the ranks' squares.

        Args:
            allowed: stage -> which layer ranges it may have.
            known: an allowed cut.
        """
        costs, limit_s = self._costs, self.slowest_s(known) * (1 + _ROUNDING)
        pace = np.array([1 / device.slowdown for device in costs.profile.cluster.devices[: self._ranks]])
        # Per partial cut: the first layers of its stages, and the layer before which the last one stops.
        begins = np.zeros((1, 0), dtype=np.int64)
        reached = np.zeros(1, dtype=np.int64)
        busy_s = self._idle(1)
        for stage in range(costs.stages):
            after = costs.stages - stage - 1
            last = costs.layers - after
            counts = last - reached if after else np.ones_like(reached)
            parent = np.repeat(np.arange(len(reached)), counts)
            firsts = reached[parent]
            within = np.arange(len(parent)) - np.repeat(np.cumsum(counts) - counts, counts)
            stops = firsts + 1 + within if after else np.full_like(firsts, costs.layers)
            fits = allowed(stage)[stops, firsts]
            parent, firsts, stops = parent[fits], firsts[fits], stops[fits]
            busy_s = busy_s[parent]
            self._add(busy_s, stage, firsts, stops)
            # The ranks must be able to compute the remaining layers within the limit.
            room = (limit_s - busy_s[:, : self._ranks]) @ pace
            kept = (busy_s.max(axis=1) <= limit_s) & (
                room >= costs.compute_s[costs.layers, stops] * (1 - 1e-9) - 1e-9 * limit_s
            )
            begins = np.column_stack([begins[parent[kept]], firsts[kept]])
            reached, busy_s = stops[kept], busy_s[kept]
        slowest_s = busy_s.max(axis=1)
        squares = np.square(busy_s[:, : self._ranks]).sum(axis=1)
        squares[slowest_s > slowest_s.min() * (1 + _ROUNDING)] = np.inf
        cut = [int(first) for first in begins[squares.argmin()]]
        return tuple(zip(cut, [*cut[1:], costs.layers], strict=True))

    def _idle(self, cuts: int) -> Matrix:
        return np.zeros((cuts, self._ranks + len(self._columns)))

    def _add(self, busy_s: Matrix, stage: int, firsts: Layers, stops: Layers) -> None:
        """Add the times of `stage` and of the messages over the cut before it to `busy_s[partial cut, rank or
        link]`."""
        costs, ranks = self._costs, self._costs.stage_ranks
        busy_s[:, ranks[stage]] += self._rank_s[stage][stops, firsts]
        if stage == 0:
            return
        sizes: tuple[tuple[int, int, Vector], ...] = (
            (stage - 1, stage, costs.forward_bytes),
            (stage, stage - 1, costs.backward_bytes),
        )
        for source, target, size_bytes in sizes:
            link = costs.link(source, target)
            if link is not None:
                busy_s[:, self._columns[ranks[source], ranks[target]]] += link.link_busy_s(size_bytes)[firsts]
