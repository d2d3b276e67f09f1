"""Pairs of ranks to probe, in rounds of those probed at the same time. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Pairs = list[tuple[int, int]]


def rounds(machines: Sequence[str], most: int, *, apart: bool) -> list[Pairs]:
    """Rounds of disjoint pairs of ranks, about `most` of them.

    Where each pair is linked in its own way, every pair once if the rounds are enough. Where all are alike, as on one
    machine, some neighbours in one round. Else neighbours on the ring, a pair within each machine, and one between any
    two machines (of more than `most` + 1 machines, as many as the rounds hold); if each pair is linked in its own way,
    those at distances 2, 4, ... fill what is left of the rounds.

    Args:
        machines: of each rank.
        apart: whether each pair may be linked in its own way; else all pairs of the same machines are alike.
    """
    ranks = len(machines)
    if apart and len(_tournament(ranks)) <= most:
        return _tournament(ranks)
    found = _at_distance(ranks, 1)
    if not apart and len(set(machines)) == 1:
        return found[:1]
    met = {_both(machines, pair) for pairs in found for pair in pairs}
    found += [pairs for pairs in _of_machines(machines, most, met) if pairs]
    distance = 2
    while apart and len(found) < most and distance <= ranks // 2:
        found += _at_distance(ranks, distance)
        distance *= 2
    return found


def _both(machines: Sequence[str], pair: Iterable[int]) -> frozenset[str]:
    return frozenset(machines[rank] for rank in pair)


def _of_machines(machines: Sequence[str], most: int, met: set[frozenset[str]]) -> list[Pairs]:
    """Pairs within machines, in one round, and between them, in `most`, without those that have `met`."""
    held: dict[str, list[int]] = {}
    for rank, machine in enumerate(machines):
        held.setdefault(machine, []).append(rank)
    firsts = [held_ranks[0] for held_ranks in held.values()]
    within = [(ranks[0], ranks[1]) for ranks in held.values() if len(ranks) > 1]
    between = [[(firsts[a], firsts[b]) for a, b in pairs] for pairs in _tournament(len(firsts))[:most]]
    return [[pair for pair in pairs if _both(machines, pair) not in met] for pairs in (within, *between)]


def _tournament(players: int) -> list[Pairs]:
    """Every pair once, by the circle method."""
    others = list(range(1, players + players % 2))
    found: list[Pairs] = []
    for _ in others:
        circle = [0, *others]
        pairs = [(circle[i], circle[-1 - i]) for i in range(len(circle) // 2)]
        found.append([(min(pair), max(pair)) for pair in pairs if max(pair) < players])
        others = [others[-1], *others[:-1]]
    return [pairs for pairs in found if pairs]


def _at_distance(ranks: int, distance: int) -> list[Pairs]:
    wanted = {(min(a, b), max(a, b)) for a in range(ranks) for b in [(a + distance) % ranks] if a != b}
    found: list[Pairs] = []
    for pair in sorted(wanted):
        free = (pairs for pairs in found if not any(set(pair) & set(other) for other in pairs))
        pairs = next(free, None)
        if pairs is None:
            found.append([pair])
        else:
            pairs.append(pair)
    return found
