"""Searches one problem: condensed cuts first, then layer by layer near the best of them; the present order of the ranks
first, then others (DynPipe, Algorithm 2, and the refinement that section V-B2 describes).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.partition.stage_costs import StageCosts
from planner.repartition.boundaries import (
    all_cuts,
    between,
    condensed_cut,
    cut_count,
    nearby_cuts,
    neighbours,
    quick_cuts,
    within_memory,
)
from planner.repartition.condensation import Blocks
from planner.repartition.device_order import all_orders, exchanged_orders
from planner.repartition.judge import Judge
from planner.repartition.pool import BATCH, Judged, Pool
from planner.repartition.problem import Candidates, Integers, Order, RepartitionProblem

MOST_CUTS = 3_000
"""Most cuts of a model of which all are tried."""
MOST_CANDIDATES = 100_000
"""Most cuts and orders together of which all are tried."""
PAIRS = 8
"""Most stages of a pipeline whose neighbours have two hand-overs at once too."""
GIVERS = 8
"""Most stages of a cut that hand layers on in its neighbours, the busiest ones."""
RADIUS = 12
"""Most layers by which the exact search nearby moves a boundary."""
BATCHES = 3
"""Batches of a cut's neighbours without an improvement after which the climb ends."""
ALIKE = 0.005
"""Share of the step by which a plan may be longer than the fastest, if it moves less."""
ORDER_GAIN = 0.01
"""Share of the step that another order must save."""
MOST_ORDERS_BOUNDED = 24
"""Orders whose cuts are bounded, the most promising ones by the bound of one cut."""
MOST_ORDERS_SEARCHED = 3
"""Orders whose cuts are searched, the most promising of those."""
EXCHANGES = 4
"""Most exchanges of ranks, one after the other."""


@dataclass(frozen=True, kw_only=True)
class RepartitionEffort:
    """The budget of a search."""

    actions: int
    """Most actions that are simulated, over all candidates."""
    simulations: int
    """Most candidates that are simulated."""

    def candidates(self, actions: int) -> int:
        """Number of candidates of so many actions that may be simulated."""
        return max(1, min(self.simulations, self.actions // actions))


QUICK = RepartitionEffort(actions=20_000_000, simulations=3_000)
"""About half a second at most, while ranks train."""


class Search:
    """One search.

    Args:
        blocks: the condensed model.
        reserved_bytes: memory of each place that stages may not use; None: memory has no limit.
    """

    def __init__(
        self,
        problem: RepartitionProblem,
        judge: Judge,
        blocks: Blocks,
        effort: RepartitionEffort,
        reserved_bytes: dict[int, int] | None = None,
    ) -> None:
        self._problem, self._judge, self._blocks = problem, judge, blocks
        self._reserved_bytes = reserved_bytes
        actions = sum(map(len, problem.window.programs))
        self._pool = Pool(judge, effort.candidates(actions), self._fits)

    def run(self, *, reorder: bool) -> tuple[Judged, ...]:
        """The simulated candidates, fastest first; none if no cut fits the memory.

        Args:
            reorder: whether ranks may exchange their parts.
        """
        problem, pool = self._problem, self._pool
        whole = pool.left
        if reorder:
            pool.left = whole // 2 + 1
        pool.judge_first(Candidates.one_order(problem.cut_now[None, :], problem.order_now), np.inf)
        best = self._best_cut(problem.order_now, problem.cut_now, np.inf)
        if reorder and problem.ranks > 1:
            pool.left += whole // 2
            limit_s = np.inf if best is None else best.step_s * (1 - ORDER_GAIN)
            if (everything := self._everything()) is not None:
                # Of few candidates all are judged: standbys, which are left out here, may favour any of them.
                if len(everything) <= BATCH:
                    pool.judge_first(everything, np.inf)
                else:
                    self._descend(everything, limit_s)
                return self._sorted()
            for order, cut in self._promising_orders(limit_s):
                found = self._best_cut(order, cut, limit_s)
                limit_s = limit_s if found is None else found.step_s
        return self._sorted()

    def _sorted(self) -> tuple[Judged, ...]:
        """The simulated candidates and, between the fastest ones and the present cut, some that move less."""
        problem, pool = self._problem, self._pool
        if not pool.judged:
            return ()
        for order in (problem.order_now, min(pool.judged, key=lambda one: one.step_s).order):
            fastest = min((one for one in pool.judged if one.order == order), key=lambda one: one.step_s)
            cuts = between(problem.cut_now, fastest.cut)
            moved = problem.moved_bytes(cuts, order)
            pool.judge_first(
                Candidates.one_order(cuts[np.argsort(moved, kind="stable")], order),
                fastest.step_s * (1 + ALIKE),
            )
        return tuple(sorted(pool.judged, key=lambda one: one.step_s))

    def _best_cut(self, order: Order, start: Integers, limit_s: float) -> Judged | None:
        """The fastest cut found for an order, if it is below `limit_s`."""
        problem, pool = self._problem, self._pool
        if cut_count(problem.layers, problem.stages) <= MOST_CUTS:
            return self._descend(
                Candidates.one_order(all_cuts(problem.layers, problem.stages), order), limit_s
            )
        starts = self._starts(order, start)
        best = pool.best_of(Candidates.one_order(starts, order), limit_s, batches=1)
        costs = self._costs(starts[-1] if best is None else best.cut, order)
        limited = self._reserved_bytes is not None
        nearby = np.concatenate([nearby_cuts(costs, cut, RADIUS, limited=limited) for cut in starts])
        best = pool.best_of(Candidates.one_order(nearby, order), _below(best, limit_s), batches=1) or best
        return best and self._climb(best)

    def _starts(self, order: Order, start: Integers) -> Integers:
        """int[N, S + 1]: the given cut, and those that are best for simpler objectives."""
        problem = self._problem
        starts = [start, *quick_cuts(problem, start, np.array([order]))]
        known = start
        # Predicted slowdowns depend on the layers: those of the first answer improve the second.
        for _ in range(1 if problem.slowdowns.constant else 2):
            reserved = self._reserved_bytes
            found = condensed_cut(problem, known, order, self._blocks, reserved)
            if found is not None:
                starts.append(found)
                known = found
        return np.unique(np.array(starts), axis=0)

    def _climb(self, best: Judged) -> Judged:
        """Move from a cut to better neighbours until there are none."""
        stages = self._problem.stages
        while True:
            busiest = None if stages <= GIVERS else self._judge.busiest(best.cut, best.order)[:GIVERS]
            cuts = neighbours(best.cut, busiest, pairs=stages <= PAIRS)
            around = Candidates.one_order(cuts, best.order)
            found = self._pool.best_of(around, best.step_s, batches=BATCHES)
            if found is None:
                return best
            best = found

    def _descend(self, candidates: Candidates, limit_s: float) -> Judged | None:
        """The fastest of all candidates that are below `limit_s`."""
        return self._pool.least_of(candidates, limit_s)

    def _everything(self) -> Candidates | None:
        """Every cut in every order, if these are few."""
        problem = self._problem
        orders = all_orders(problem)
        count = cut_count(problem.layers, problem.stages)
        if orders is None or count * len(orders) > MOST_CANDIDATES:
            return None
        cuts = all_cuts(problem.layers, problem.stages)
        return Candidates(np.tile(cuts, (len(orders), 1)), np.repeat(orders, len(cuts), axis=0))

    def _promising_orders(self, limit_s: float) -> list[tuple[Order, Integers]]:
        """Other orders, each with a cut, whose bound is below `limit_s`; the most promising first."""
        problem = self._problem
        orders = all_orders(problem)
        if orders is None:
            orders = self._exchanges()
        orders = orders[(orders != np.array(problem.order_now)).any(axis=1)]
        if not len(orders):
            return []
        cuts = quick_cuts(problem, problem.cut_now, orders)
        bounds_s = self._judge.bound_s(Candidates(cuts, orders))
        found: list[tuple[float, Order, Integers]] = []
        for row in np.argsort(bounds_s, kind="stable")[:MOST_ORDERS_BOUNDED]:
            order = tuple(orders[row].tolist())
            # Messages and the first microbatch's way may favour other cuts than the one that balances the stages.
            more = neighbours(cuts[row]) if problem.stages <= PAIRS else cuts[:0]
            around = Candidates.one_order(np.concatenate([cuts[[row]], more]), order)
            nearby_s = self._judge.bound_s(around)
            best = int(nearby_s.argmin())
            found.append((float(nearby_s[best]), order, around.cuts[best]))
        found.sort(key=lambda each: each[0])
        return [(order, cut) for bound_s, order, cut in found[:MOST_ORDERS_SEARCHED] if bound_s < limit_s]

    def _exchanges(self) -> Integers:
        """int[N, R]: orders that one exchange after the other leads to, each the most promising by its bound."""
        problem = self._problem
        order, least_s = problem.order_now, np.inf
        found: list[Integers] = []
        for _ in range(EXCHANGES):
            orders = exchanged_orders(problem, order)
            if not len(orders):
                break
            bounds_s = self._judge.bound_s(Candidates(quick_cuts(problem, problem.cut_now, orders), orders))
            best = int(bounds_s.argmin())
            if bounds_s[best] >= least_s * (1 - ORDER_GAIN):
                break
            found.append(orders)
            order, least_s = tuple(orders[best].tolist()), float(bounds_s[best])
        return np.concatenate(found) if found else np.empty((0, problem.ranks), dtype=np.int64)

    def _fits(self, candidates: Candidates) -> NDArray[np.bool_]:
        fits = np.ones(len(candidates), dtype=bool)
        if self._reserved_bytes is None or not len(candidates):
            return fits
        for order in np.unique(candidates.orders, axis=0):
            rows = (candidates.orders == order).all(axis=1)
            costs = self._costs(candidates.cuts[rows][0], tuple(order.tolist()))
            fits[rows] = within_memory(costs, candidates.cuts[rows])
        return fits

    def _costs(self, cut: Integers, order: Order) -> StageCosts:
        return self._problem.costs(cut, order, reserved_bytes=self._reserved_bytes)


def _below(best: Judged | None, limit_s: float) -> float:
    return limit_s if best is None else best.step_s
