"""Where to cut, for a given device order: starts from condensed models, exact search nearby, neighbours of a cut.

Nothing here simulates: `search.py` has what is proposed here judged.
"""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray

from planner.partition import bottleneck
from planner.partition.minmax import backtrack, legal
from planner.partition.stage_costs import Ranges, StageCosts
from planner.plan import PlanError
from planner.repartition.condensation import Blocks, condense
from planner.repartition.problem import Floats, Integers, Order, RepartitionProblem

SLACKS = (0.0, 0.003, 0.01, 0.03, 0.1)
"""Relative slacks of the busiest stage over its minimum, for less time until the first microbatch is through."""
STRIDES = (1, 2, 3, 5, 8)
"""Layers by which neighbours of a cut move one boundary."""
_FIT_ROUNDS = 16
"""Halvings of the interval in which the shortest bottleneck lies: to 2e-5 of it."""


def blocks_of(problem: RepartitionProblem, *, pivotal: int | None = None) -> Blocks:
    """The problem's condensed model."""
    layers, links = problem.profile.model.layers, problem.profile.cluster.links
    again = frozenset(problem.now.recompute)
    slowest = min(
        (link.bytes_per_s for row in links for link in row if link is not None), default=float("inf")
    )
    return condense(
        [
            layer.backward_s + layer.kept_s + layer.forward_s * (2 if number in again else 1)
            for number, layer in enumerate(layers)
        ],
        [(layer.boundary_bytes + layer.boundary_grad_bytes) / slowest for layer in layers],
        problem.stages,
        pivotal=pivotal,
        apart=[int(cut) for cut in problem.cut_now],
    )


def condensed_cut(
    problem: RepartitionProblem,
    cut: Integers,
    order: Order,
    blocks: Blocks,
    reserved_bytes: dict[int, int] | None,
) -> Integers | None:
    """The cut between blocks with the shortest bottleneck, for the slowdowns of `cut`.

    Args:
        reserved_bytes: memory that stages may not use, by place in `order`; None: memory has no limit.

    Returns:
        int[S + 1]; None if no cut between blocks fits the memory, or there are fewer blocks than stages.
    """
    if len(blocks) < problem.stages:
        return None
    costs = problem.costs(cut, order, blocks, reserved_bytes)
    try:
        ranges = bottleneck.partition(costs, limited=reserved_bytes is not None)
    except PlanError:
        return None
    starts = [blocks[first][0] for first, _ in ranges]
    return np.array([*starts, problem.layers])


def nearby_cuts(costs: StageCosts, cut: Integers, radius: int, *, limited: bool) -> Integers:
    """int[K, S + 1]: of the cuts whose boundaries lie within `radius` layers of those of `cut`, for each of `SLACKS`
    the one that takes least time over all stages with a bottleneck at most that much longer than the shortest.

    Exact with one stage per rank, in O(stages x radius^2).

    Args:
        costs: of layers, not of blocks.
        limited: whether every stage must fit its device's memory; then there may be no cut.
    """
    stages, layers = costs.stages, costs.layers
    low = np.maximum(np.arange(stages + 1), cut - radius)
    high = np.minimum(layers - stages + np.arange(stages + 1), cut + radius)
    low[0] = high[0] = 0
    low[-1] = high[-1] = layers
    cost, work = [], []
    for stage in range(stages):
        at = slice(low[stage + 1], high[stage + 1] + 1), slice(low[stage], high[stage] + 1)
        own = legal(bottleneck.stage_s(costs, stage, at), at)
        if limited:
            own[costs.memory_bytes(stage, at) > costs.limit_bytes(stage)] = np.inf
        cost.append(own)
        work.append(costs.time_s(stage, at))
    largest = np.zeros(1)
    for own in cost:
        largest = np.maximum(own, largest).min(axis=1)
    if not np.isfinite(largest[0]):
        return np.empty((0, stages + 1), dtype=np.int64)
    found: list[Ranges] = []
    for slack in SLACKS:
        limit = largest[0] * (1 + slack + 1e-12)
        total, begins = np.zeros(1), []
        for stage, own in enumerate(cost):
            reached = np.where(own <= limit, work[stage], np.inf) + total
            chosen = reached.argmin(axis=1)
            total = reached[np.arange(len(chosen)), chosen]
            begin = np.zeros(layers + 1, dtype=np.int64)
            begin[low[stage + 1] : high[stage + 1] + 1] = chosen + low[stage]
            begins.append(begin)
        found.append(backtrack(begins, layers))
    return np.array([[first for first, _ in ranges] + [layers] for ranges in dict.fromkeys(found)])


def quick_cuts(problem: RepartitionProblem, cut: Integers, orders: Integers) -> Integers:
    """int[N, S + 1]: for each order a cut with the shortest slowest stage, found by halving; messages and memory do not
    count, and a rank's stages get equal shares.

    Args:
        cut: whose slowdowns are taken.
        orders: int[N, R].
    """
    layers, stages = problem.layers, problem.stages
    again = frozenset(problem.now.recompute)
    seconds = np.array(
        [
            (layer.backward_s + layer.forward_s * (2 if number in again else 1), layer.kept_s)
            for number, layer in enumerate(problem.profile.model.layers)
        ]
    )
    of_first, of_others = (
        np.concatenate([[0.0], np.cumsum(s)]) for s in (seconds[:, 0], seconds.sum(axis=1))
    )
    slow = problem.slowdowns.of(np.tile(cut, (len(orders), 1)), orders).max(axis=1)
    slow = np.maximum(slow[:, list(problem.stage_ranks)], 1e-9)

    def packed(limit_s: np.ndarray) -> tuple[Integers, np.ndarray]:
        """Every stage takes what it can; (the cuts, their slowest stages)."""
        cuts = np.zeros((len(orders), stages + 1), dtype=np.int64)
        for stage in range(stages - 1):
            sums = of_others if stage else of_first
            reach = sums[cuts[:, stage]] + limit_s / slow[:, stage]
            stops = np.searchsorted(sums, reach * (1 + 1e-12), side="right") - 1
            cuts[:, stage + 1] = np.minimum(
                np.maximum(stops, cuts[:, stage] + 1), layers - stages + stage + 1
            )
        cuts[:, -1] = layers
        stage_s = of_others[cuts[:, 1:]] - of_others[cuts[:, :-1]]
        stage_s[:, 0] = of_first[cuts[:, 1]]
        return cuts, (stage_s * slow).max(axis=1)

    low = of_first[-1] / (1 / slow).sum(axis=1)
    cuts, high = packed(low)
    for _ in range(_FIT_ROUNDS):
        middle = (low + high) / 2
        tried, slowest = packed(middle)
        good = slowest <= middle * (1 + 1e-9)
        better = slowest < high
        cuts[better] = tried[better]
        high = np.minimum(high, slowest)
        low = np.where(good, low, middle)
    return cuts


def neighbours(cut: Integers, givers: Integers | None = None, *, pairs: bool = False) -> Integers:
    """int[N, S + 1]: one boundary moved by `STRIDES` layers, or one layer handed from one stage to any other, with the
    stages between passing one on.

    Args:
        givers: the stages that hand layers on; None: all.
        pairs: with two such hand-overs at once too.
    """
    stages = len(cut) - 1
    if stages == 1:
        return np.empty((0, 2), dtype=np.int64)
    inner = np.eye(stages + 1, dtype=np.int64)[1:-1]
    moves = [sign * stride * inner for stride in STRIDES for sign in (1, -1)]
    giver, taker = np.meshgrid(np.arange(stages) if givers is None else givers, np.arange(stages))
    giver, taker = giver.ravel()[:, None], taker.ravel()[:, None]
    numbers = np.arange(stages + 1)
    passed = ((numbers > taker) & (numbers <= giver)).astype(np.int64)
    passed -= (numbers > giver) & (numbers <= taker)
    moves.append(passed[(giver != taker).ravel()])
    if pairs:
        twice = (moves[-1][:, None, :] + moves[-1][None, :, :]).reshape(-1, stages + 1)
        moves.append(np.unique(twice, axis=0))
    changed = cut + np.concatenate(moves)
    return changed[(np.diff(changed, axis=1) > 0).all(axis=1)]


def between(now: Integers, then: Integers) -> Integers:
    """int[N, S + 1]: `then` for a run of boundaries, and `now` for the others."""
    first, stop = np.triu_indices(len(now) - 1, 1)
    numbers = np.arange(len(now))
    cuts = np.where((numbers >= first[:, None]) & (numbers < stop[:, None]), then, now)
    return cuts[(np.diff(cuts, axis=1) > 0).all(axis=1)]


def cut_count(layers: int, stages: int) -> int:
    """Number of possible cuts."""
    return comb(layers - 1, stages - 1)


def all_cuts(layers: int, stages: int) -> Integers:
    """int[N, S + 1]: every cut."""
    inner = list(combinations(range(1, layers), stages - 1))
    cuts = np.zeros((len(inner), stages + 1), dtype=np.int64)
    cuts[:, 1:-1] = np.array(inner, dtype=np.int64).reshape(len(inner), stages - 1)
    cuts[:, -1] = layers
    return cuts


def within_memory(costs: StageCosts, cuts: Integers) -> NDArray[np.bool_]:
    """bool[N]: whether the stages of each cut fit their devices, as far as partition programs see."""
    ranks = range(max(costs.stage_ranks) + 1)
    limits = [
        costs.limit_bytes(costs.stage_ranks.index(rank)) * costs.stage_ranks.count(rank) for rank in ranks
    ]
    return np.all(rank_bytes(costs, cuts) <= np.array(limits), axis=1)


def rank_bytes(costs: StageCosts, cuts: Integers) -> Floats:
    """float[N, R]: the sum over each rank's stages of what partition programs see of their memory. Their peaks need not
    coincide, and working memory, messages and standbys are left out."""
    taken = np.zeros((len(cuts), max(costs.stage_ranks) + 1))
    for stage, rank in enumerate(costs.stage_ranks):
        taken[:, rank] += costs.memory_of_ranges(stage, cuts[:, stage], cuts[:, stage + 1])
    return taken
