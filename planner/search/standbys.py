"""Which places keep a copy of which layer, so that no single failure domain holds the last one. Pure.

A copy is in another domain, near the places that would inherit the layer if its owner failed. The load is balanced, as
every place receives and updates its copies at every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from planner.plan import Plan

_NEARNESS = 0.2
"""The weight of one byte of distance from the layer's neighbours, against one byte of extra load."""
_ROUNDS = 8
"""Most passes over the layers; two or three usually converge."""


def assign(plan: Plan, domains: Sequence[str], parameter_bytes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Per layer, the places that keep a copy of it: one, or none without need or without another place.

    With several pipelines a layer has several owners. If they are in different domains, or if all places are in one
    domain, they replace each other and need no copy. Otherwise the copy goes to a place that does not own the layer, in
    another domain if there is one. A place is near if it holds layers close to this one: when the pipeline shrinks, the
    first layers of a stage move to the place before, the last ones to the place after.

    Args:
        domains: per place, its failure domain: its node.
        parameter_bytes: per layer.

    Raises:
        ValueError: not one domain per place, or not one size per layer.
    """
    places = plan.world_size
    layers = plan.layers[-1][1]
    if len(domains) != places:
        raise ValueError(f"the plan has {places} places, and {len(domains)} domains are given")
    if len(parameter_bytes) != layers:
        raise ValueError(f"the plan has {layers} layers, and the bytes of {len(parameter_bytes)} are given")
    others = [_others(plan.siblings(rank), domains) for rank in range(plan.pipeline_ranks)]
    distances = _distances(plan, parameter_bytes)
    choices = [
        {place: distances[plan.place(place).rank][layer] for place in others[owner]}
        for (first, stop), owner in zip(plan.layers, plan.stage_ranks, strict=True)
        for layer in range(first, stop)
    ]
    chosen = _balanced(choices, parameter_bytes, places)
    return tuple(() if place is None else (place,) for place in chosen)


def _others(owners: Sequence[int], domains: Sequence[str]) -> list[int]:
    """The places that may keep copies of the layers of `owners`; none where the owners replace each other."""
    places = range(len(domains))
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
    """Per layer, the chosen place. Starts with the nearest places and moves one layer at a time to reduce the sum of
    half the squared loads and of `_NEARNESS` times size times distance."""
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
