"""Which places keep a copy of which layer, so that no single failure domain holds the last one. Pure.

A copy sits in another domain, near those who would inherit the layer if its owner were lost, and no place carries much
more than another: what stands by is received and updated at every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from planner.plan import Plan

_NEARNESS = 0.2
"""What a byte's distance from its layer's neighbours weighs against a byte more than another place carries."""
_ROUNDS = 8
"""How often the layers are gone through at most; two or three settle."""


def assign(plan: Plan, domains: Sequence[str], parameter_bytes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Per layer the places that stand by it: one, or none where there is no need or no other place.

    With several pipelines a layer has as many owners; where those sit in different domains, or all places in one, they
    stand in for each other. Otherwise the copy goes to a place that owns no copy, in another domain if there is one.
    The layers before and after it in the pipeline say how near a place is: on a shrink a stage's first layers go to the
    place before, its last ones to the place after.

    Args:
        domains: per place, what fails together with it: its node.
        parameter_bytes: per layer.

    Raises:
        ValueError: not a domain per place, or not a number per layer.
    """
    places, ranks = plan.world_size, plan.pipeline_ranks
    layers = plan.layers[-1][1]
    if len(domains) != places:
        raise ValueError(f"the plan has {places} places, and {len(domains)} domains are given")
    if len(parameter_bytes) != layers:
        raise ValueError(f"the plan has {layers} layers, and the bytes of {len(parameter_bytes)} are given")
    others = [_others(rank, ranks, domains) for rank in range(ranks)]
    distances = _distances(plan, parameter_bytes)
    choices = [
        {place: distances[place % ranks][layer] for place in others[owner]}
        for (first, stop), owner in zip(plan.layers, plan.stage_ranks, strict=True)
        for layer in range(first, stop)
    ]
    chosen = _balanced(choices, parameter_bytes, places)
    return tuple(() if place is None else (place,) for place in chosen)


def _others(rank: int, ranks: int, domains: Sequence[str]) -> list[int]:
    """The places that may stand by the layers of pipeline rank `rank`; none where its siblings do."""
    places = range(len(domains))
    owners = places[rank::ranks]
    theirs = {domains[place] for place in owners}
    elsewhere = [place for place in places if domains[place] not in theirs]
    if len(owners) > 1 and (len(theirs) > 1 or not elsewhere):
        return []
    return elsewhere or [place for place in places if place not in owners]


def _distances(plan: Plan, sizes: Sequence[int]) -> list[list[int]]:
    """`[pipeline rank][layer]`: the bytes of the layers between it and the nearest one that the rank holds."""
    sums = [0, *accumulate(sizes)]
    distances: list[list[int]] = []
    for rank in range(plan.pipeline_ranks):
        near = [sums[-1]] * len(sizes)
        for (first, stop), owner in zip(plan.layers, plan.stage_ranks, strict=True):
            if owner != rank:
                continue
            begin, end = sums[first], sums[stop]
            near[:first] = [min(d, begin - s) for d, s in zip(near[:first], sums[1:], strict=False)]
            near[first:stop] = [0] * (stop - first)
            near[stop:] = [min(d, s - end) for d, s in zip(near[stop:], sums[stop:], strict=False)]
        distances.append(near)
    return distances


def _balanced(choices: Sequence[dict[int, int]], sizes: Sequence[int], places: int) -> list[int | None]:
    """Per layer the chosen place: the nearest at first, then whatever makes the sum of half the squared loads and of
    `_NEARNESS` times size times distance smaller, one layer at a time."""
    chosen: list[int | None] = []
    load = [0] * places
    for near, size in zip(choices, sizes, strict=True):
        place = min(near, key=lambda place: (near[place], load[place], place), default=None)
        chosen.append(place)
        if place is not None:
            load[place] += size
    for _ in range(_ROUNDS):
        moved = False
        for layer, (near, size) in enumerate(zip(choices, sizes, strict=True)):
            now = chosen[layer]
            if now is None or not size:
                continue
            load[now] -= size
            best, least = now, load[now] + _NEARNESS * near[now]
            for place, distance in near.items():
                price = load[place] + _NEARNESS * distance
                if price < least:
                    best, least = place, price
            load[best] += size
            moved = moved or best != now
            chosen[layer] = best
        if not moved:
            break
    return chosen
