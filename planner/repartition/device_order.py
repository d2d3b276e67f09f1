"""Which rank takes which part of the schedule: orders in which ranks of unusual speed hold another part. Pure.

A slow rank suits a part with little work, such as where one long layer would be too much for it. An exchange moves all
layers of both ranks, so only orders that gain much are worth their bytes; `planner/adapt/policy.py` weighs that.
"""

from __future__ import annotations

from itertools import permutations
from math import factorial
from statistics import median

import numpy as np

from planner.repartition.problem import Floats, Integers, Order, Problem

UNUSUAL = 1.05
"""Factor between a rank's slowdown and the median's beyond which it may change its part."""
MOST_UNUSUAL = 4
"""Most ranks that change their parts in one search: those furthest from the median."""
MOST_ORDERS = 720
"""Most orders of which all are tried."""


def all_orders(problem: Problem) -> Integers | None:
    """int[N, R]: every order of the ranks, the present one first; None if there are more than `MOST_ORDERS`."""
    if factorial(problem.ranks) > MOST_ORDERS:
        return None
    orders = np.array(list(permutations(range(problem.ranks))))
    present = (orders == np.array(problem.order_now)).all(axis=1)
    return np.concatenate([orders[present], orders[~present]])


def exchanged_orders(problem: Problem, order: Order) -> Integers:
    """int[N, R]: `order` with one unusual rank in exchange with any other; there may be none."""
    slow = rank_slowdowns(problem)
    middle = median(slow.tolist())
    distance = np.abs(np.log(slow / middle))
    furthest = np.argsort(-distance, kind="stable")[:MOST_UNUSUAL].tolist()
    unusual = [rank for rank in furthest if distance[rank] > np.log(UNUSUAL)]
    found: dict[Order, None] = {}
    for rank in unusual:
        part = order.index(rank)
        for other in range(problem.ranks):
            changed = list(order)
            changed[part], changed[other] = changed[other], changed[part]
            if other != part:
                found[tuple(changed)] = None
    return np.array(list(found), dtype=np.int64).reshape(-1, problem.ranks)


def rank_slowdowns(problem: Problem) -> Floats:
    """float[P]: of each pipeline rank with its present layers; of siblings, the slowest."""
    places = np.array(problem.slowdowns_of(problem.cut_now, problem.order_now))
    return places.reshape(problem.now.pipeline_count, problem.ranks).max(axis=0)
