"""Hill climbing on cuts: stages give layers to each other as long as that is better. Knows no cost.

The partition programs see one stage, or one merged pair of stages, at a time; a simulated step sees fill, drain,
waiting and all stages of a rank too. What they miss is mostly a layer or two away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, combinations_with_replacement, pairwise, permutations
from random import Random

from planner.partition.stage_costs import Ranges

_KICK = 3
"""Layers that change stage at random before climbing begins anew: one more than climbing tries by itself."""


def refine(
    starts: Sequence[Ranges],
    better: Callable[[Ranges, Ranges], bool],
    *,
    evaluations: int,
    restarts: int = 0,
) -> Ranges:
    """The best of the cuts that `starts` lead to by first improvement, and of what random cuts near it lead to. The
    same arguments give the same cut.

    Args:
        starts: the most promising first: they share the evaluations.
        better: whether the first cut is better than the second. Asked again for cuts that it was asked for before.
        evaluations: how many cuts are looked at, at most; then the best so far is returned.
        restarts: how many random cuts are climbed from.
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
    """The top reached from `start`, or as far as it gets until `seen`, to which all that is looked at is added, is as
    large as `evaluations`."""
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
    """All cuts in which one stage gives a layer to another, the nearest first, then those with two such gifts.

    What lies between two stages passes its own layers on. Two gifts at once let a rank with several stages trade one
    for another, and pass by cuts that do not fit the memory.
    """
    counts = [stop - first for first, stop in ranges]
    gifts = sorted(permutations(range(len(counts)), 2), key=lambda gift: abs(gift[0] - gift[1]))
    for given in chain(((gift,) for gift in gifts), combinations_with_replacement(gifts, 2)):
        changed = list(counts)
        for giver, taker in given:
            changed[giver] -= 1
            changed[taker] += 1
        if min(changed) > 0:
            yield _cut(changed)


def _kick(ranges: Ranges, rng: Random) -> Ranges:
    """A cut near `ranges`: `_KICK` times a random stage gives a layer to a random other one."""
    counts = [stop - first for first, stop in ranges]
    for _ in range(_KICK):
        givers = [stage for stage, count in enumerate(counts) if count > 1]
        if givers:
            counts[rng.choice(givers)] -= 1
            counts[rng.randrange(len(counts))] += 1
    return _cut(counts)


def _cut(counts: list[int]) -> Ranges:
    return tuple(pairwise([0, *accumulate(counts)]))
