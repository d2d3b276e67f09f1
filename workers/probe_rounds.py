"""Which pairs of ranks are probed, and which of them at the same time. Pure."""

from __future__ import annotations

Pairs = list[tuple[int, int]]


def rounds(ranks: int, most: int) -> list[Pairs]:
    """Rounds of disjoint pairs of `ranks` ranks, about `most` of them: every pair once where they are enough (the
    circle method of tournaments), else the pairs at distances 1, 2, 4, ... on the ring."""
    if ranks - 1 + ranks % 2 <= most:
        return _tournament(ranks)
    found: list[Pairs] = []
    distance = 1
    while len(found) < most and distance <= ranks // 2:
        found += _at_distance(ranks, distance)
        distance *= 2
    return found


def _tournament(ranks: int) -> list[Pairs]:
    others = list(range(1, ranks + ranks % 2))
    found: list[Pairs] = []
    for _ in others:
        circle = [0, *others]
        pairs = [(circle[i], circle[-1 - i]) for i in range(len(circle) // 2)]
        found.append([(min(pair), max(pair)) for pair in pairs if max(pair) < ranks])
        others = [others[-1], *others[:-1]]
    return [pairs for pairs in found if pairs]


def _at_distance(ranks: int, distance: int) -> list[Pairs]:
    wanted = {(min(a, b), max(a, b)) for a in range(ranks) for b in [(a + distance) % ranks]}
    found: list[Pairs] = []
    for pair in sorted(wanted):
        free = (pairs for pairs in found if not any(set(pair) & set(other) for other in pairs))
        pairs = next(free, None)
        if pairs is None:
            found.append([pair])
        else:
            pairs.append(pair)
    return found
