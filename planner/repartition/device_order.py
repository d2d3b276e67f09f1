"""Assignment of ranks to parts of the schedule: orders in which ranks of unusual speed hold another part. Pure.

A slow rank suits a part with little work, such as where one long layer would be too much for it. An exchange moves all
layers of both ranks, so only orders that gain much are worth their bytes; `planner/adapt/policy.py` weighs that.
"""

from __future__ import annotations

from itertools import pairwise, permutations
from math import factorial
from statistics import median

import numpy as np

from planner.profile import Link
from planner.repartition.problem import Floats, Integers, Order, RepartitionProblem

UNUSUAL = 1.05
"""Factor between a rank's slowdown and the median's beyond which it may change its part."""
MOST_UNUSUAL = 4
"""Most ranks that change their parts in one search: those furthest from the median."""
MOST_ORDERS = 720
"""Most orders of which all are tried."""


def all_orders(problem: RepartitionProblem) -> Integers | None:
    """int[N, R]: every order of the ranks, the present one first; None if there are more than `MOST_ORDERS`."""
    if factorial(problem.ranks) > MOST_ORDERS:
        return None
    orders = np.array(list(permutations(range(problem.ranks))))
    present = (orders == np.array(problem.order_now)).all(axis=1)
    return np.concatenate([orders[present], orders[~present]])


def exchanged_orders(problem: RepartitionProblem, order: Order) -> Integers:
    """int[N, R]: `order` with one unusual rank in exchange with any other: of unusual speed, or at the slowest link
    that messages take; there may be none."""
    slow = rank_slowdowns(problem)
    middle = median(slow.tolist())
    distance = np.abs(np.log(slow / middle))
    furthest = np.argsort(-distance, kind="stable")[:MOST_UNUSUAL].tolist()
    unusual = [rank for rank in furthest if distance[rank] > np.log(UNUSUAL)]
    unusual += [rank for rank in _at_slow_links(problem, order) if rank not in unusual]
    found: dict[Order, None] = {}
    for rank in unusual:
        part = order.index(rank)
        for other in range(problem.ranks):
            changed = list(order)
            changed[part], changed[other] = changed[other], changed[part]
            if other != part:
                found[tuple(changed)] = None
    return np.array(list(found), dtype=np.int64).reshape(-1, problem.ranks)


def _at_slow_links(problem: RepartitionProblem, order: Order) -> list[int]:
    """The two ranks at the slowest link that messages take in `order`, if it is unlike the others."""
    layers, links = problem.profile.model.layers[:-1], problem.profile.cluster.links
    there, back = (
        sum(sizes) / max(1, len(layers))
        for sizes in (
            [layer.boundary_bytes for layer in layers],
            [layer.boundary_grad_bytes for layer in layers],
        )
    )
    places = [order[rank] for rank in problem.stage_ranks]
    taken_s: dict[tuple[int, int], float] = {}
    for a, b in pairwise(places):
        sent, answered = links[a][b], links[b][a]
        if sent is not None and answered is not None:
            taken_s[a, b] = _message_s(sent, there) + _message_s(answered, back)
    if len(taken_s) < 2:
        return []
    slowest = max(taken_s, key=taken_s.__getitem__)
    return [*slowest] if taken_s[slowest] > UNUSUAL * median(taken_s.values()) else []


def _message_s(link: Link, size: float) -> float:
    return link.sender_busy_s(size) + link.transfer_s(size) + link.receiver_busy_s(size)


def rank_slowdowns(problem: RepartitionProblem) -> Floats:
    """float[P]: of each pipeline rank with its present layers; of siblings, the slowest."""
    places = np.array(problem.slowdowns_of(problem.cut_now, problem.order_now))
    return places.reshape(problem.now.pipeline_count, problem.ranks).max(axis=0)
