"""Hill climbing on cuts: moves layers between stages as long as the cut improves. Knows no cost.

A partition program sees one stage, or one merged pair of stages, at a time. A simulated step also sees fill, drain,
waiting and all stages of a rank. The best simulated cut is mostly one or two layers away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, combinations_with_replacement, pairwise, permutations
from random import Random

from planner.partition.stage_costs import Ranges

_KICK = 3
"""Layers that change stage at random before each restart: one more than climbing tries by itself."""


def refine(
    starts: Sequence[Ranges],
    better: Callable[[Ranges, Ranges], bool],
    *,
    evaluations: int,
    restarts: int = 0,
) -> Ranges:
    """The best cut that first improvement reaches from `starts` and from random cuts near the best. Deterministic.

    Args:
        starts: the most promising first; they share the evaluations.
        better: whether the first cut is better than the second; called repeatedly for the same cuts.
        evaluations: the most cuts to compare; then the best so far is returned.
        restarts: the number of random cuts to start from.
    """
    rng = Random(0)
    seen: set[Ranges] = set()
    best = _climb(starts[0], better, seen, evaluations)
    for number in range(1, len(starts) + restarts):
        if len(seen) >= evaluations:
            break
        start = starts[number] if number < len(starts) else _kick(best, rng)
        top = _climb(start, better, seen, evaluations)
        if better(top, best):
            best = top
    return best


def _climb(
    start: Ranges, better: Callable[[Ranges, Ranges], bool], seen: set[Ranges], evaluations: int
) -> Ranges:
    """The local optimum reached from `start`, or the best cut once `seen`, which collects all compared cuts, holds
    `evaluations` of them."""
    best = start
    seen.add(start)
    improved = True
    while improved:
        improved = False
        for cut in _neighbours(best):
            if cut not in seen and len(seen) >= evaluations:
                return best
            seen.add(cut)
            if better(cut, best):
                best, improved = cut, True
                break
    return best


def _neighbours(ranges: Ranges) -> Iterator[Ranges]:
    """All cuts in which one stage gives one layer to another, nearest stages first; then all with two such moves.

    Stages between the two pass layers on. Two moves at once let a rank with several stages exchange layers between
    them, and skip cuts that do not fit the memory.
    """
    counts = [stop - first for first, stop in ranges]
    moves = sorted(permutations(range(len(counts)), 2), key=lambda move: abs(move[0] - move[1]))
    for moved in chain(((move,) for move in moves), combinations_with_replacement(moves, 2)):
        changed = list(counts)
        for giver, taker in moved:
            changed[giver] -= 1
            changed[taker] += 1
        if min(changed) > 0:
            yield _cut(changed)


def _kick(ranges: Ranges, rng: Random) -> Ranges:
    """A cut near `ranges`: `_KICK` times, a random stage gives a layer to a random stage."""
    counts = [stop - first for first, stop in ranges]
    for _ in range(_KICK):
        givers = [stage for stage, count in enumerate(counts) if count > 1]
        if givers:
            counts[rng.choice(givers)] -= 1
            counts[rng.randrange(len(counts))] += 1
    return _cut(counts)


def _cut(counts: list[int]) -> Ranges:
    return tuple(pairwise([0, *accumulate(counts)]))
