"""Candidates that a search has judged, and its budget: bounds all new ones, simulates the most promising in batches.

The bound only decides which simulations are not needed; the simulator judges. Deterministic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.repartition.judge import Judge
from planner.repartition.problem import Candidates, Integers, Order

BATCH = 64
"""Candidates that are simulated together."""
NEAR = 1e-9
"""Relative: steps closer than this are equal."""


@dataclass(frozen=True)
class Judged:
    """One simulated candidate."""

    cut: Integers
    """int[S + 1]."""
    order: Order
    step_s: float
    """Without standbys."""


class Pool:
    """Pool of judged candidates.

    Args:
        simulations: most candidates to simulate.
        fits: which candidates may be simulated, bool[N].
    """

    def __init__(
        self, judge: Judge, simulations: int, fits: Callable[[Candidates], NDArray[np.bool_]]
    ) -> None:
        self._judge = judge
        self._fits = fits
        self._seen: set[bytes] = set()
        self.left = simulations
        self.judged: list[Judged] = []

    def best_of(self, candidates: Candidates, limit_s: float, *, batches: int | None = None) -> Judged | None:
        """Simulate the new ones of `candidates`, in the order of their bounds and as long as these are below `limit_s`;
        return the first batch's fastest that is below `limit_s` too, or None.

        Args:
            batches: most batches to simulate; None: as many as it takes.
        """
        candidates = self._new(candidates)
        bounds_s = self._judge.bound_s(candidates)
        promising = np.argsort(bounds_s, kind="stable")
        promising = promising[bounds_s[promising] < limit_s * (1 - NEAR)]
        if batches is not None:
            promising = promising[: batches * BATCH]
        for begin in range(0, len(promising), BATCH):
            rows = promising[begin : begin + min(BATCH, self.left)]
            if not len(rows):
                return None
            found = self._simulate(candidates.select(rows))
            if found.step_s < limit_s * (1 - NEAR):
                return found
        return None

    def least_of(self, candidates: Candidates, limit_s: float) -> Judged | None:
        """The fastest of the new ones of `candidates` that is below `limit_s`, or None: they are simulated in the order
        of their bounds, as long as these are below the fastest so far and there are simulations left."""
        candidates = self._new(candidates)
        bounds_s = self._judge.bound_s(candidates)
        promising = np.argsort(bounds_s, kind="stable")
        best: Judged | None = None
        begin = 0
        while begin < len(promising) and self.left > 0:
            rows = promising[begin : begin + min(BATCH, self.left)]
            rows = rows[bounds_s[rows] < limit_s * (1 - NEAR)]
            if not len(rows):
                break
            found = self._simulate(candidates.select(rows))
            if found.step_s < limit_s * (1 - NEAR):
                best, limit_s = found, found.step_s
            begin += len(rows)
        return best

    def judge_first(self, candidates: Candidates, limit_s: float) -> None:
        """Simulate the first batch of the new ones of `candidates` whose bound is below `limit_s`."""
        candidates = self._new(candidates)
        rows = np.flatnonzero(self._judge.bound_s(candidates) < limit_s)[: min(BATCH, self.left)]
        if len(rows):
            self._simulate(candidates.select(rows))

    def _new(self, candidates: Candidates) -> Candidates:
        if self._seen:
            rows = np.ascontiguousarray(np.concatenate([candidates.orders, candidates.cuts], axis=1))
            size = rows.shape[1] * rows.itemsize
            raw = rows.tobytes()
            new = [raw[begin : begin + size] not in self._seen for begin in range(0, len(raw), size)]
            candidates = candidates.select(np.array(new, dtype=bool))
        return candidates.select(self._fits(candidates))

    def _simulate(self, candidates: Candidates) -> Judged:
        """The fastest."""
        self.left -= len(candidates)
        steps_s = self._judge.step_s(candidates)
        for cut, order, step_s in zip(candidates.cuts, candidates.orders, steps_s.tolist(), strict=True):
            self._seen.add(np.concatenate([order, cut]).tobytes())
            self.judged.append(Judged(cut, tuple(order.tolist()), step_s))
        return self.judged[len(self.judged) - len(candidates) + int(steps_s.argmin())]
