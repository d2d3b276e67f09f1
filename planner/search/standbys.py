"""Placement of layer copies, up to date or of some earlier step, so that no failure domain holds the last one. Pure.

Copies are in other domains than their layer, near the places that would inherit the layer if its owner failed. The
load is balanced, as every place receives and updates its copies at every step.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from planner.failure_domains import zone_of
from planner.plan import Plan

Integers = NDArray[np.int64]

_NEARNESS = 0.2
"""The weight of one byte of distance from the layer's neighbours, against one byte of extra load."""
_ROUNDS = 8
"""Most passes over the copies; two or three usually converge."""


def protected(
    plan: Plan, domains: Sequence[str], parameter_bytes: Sequence[int], copies: int, every: int
) -> Plan:
    """`plan` with `copies` copies of each layer, as `assign` places them.

    Args:
        every: 1: standbys, which follow each step; more: snapshots, taken anew every so many steps.
    """
    plan = replace(plan, standbys=(), snapshots=(), snapshot_every=0)
    if not copies:
        return plan
    places = assign(plan, domains[: plan.world_size], parameter_bytes, copies)
    if every == 1 or not any(places):  # siblings on other nodes are each other's copies
        return replace(plan, standbys=places)
    return replace(plan, snapshots=places, snapshot_every=every)


def assign(
    plan: Plan, domains: Sequence[str], parameter_bytes: Sequence[int], copies: int = 1
) -> tuple[tuple[int, ...], ...]:
    """Per layer, or per shard of each layer (`Plan.pieces`), the places that keep a copy of it, ascending.

    The owners of a layer and its copies are in `copies` + 1 domains, or in as many as there are: each copy is in a
    domain that holds the layer nowhere else, and in a zone that holds it nowhere else while there is such a zone. With
    several pipelines a layer has several owners, which replace each other as copies do; a shard has one. If all places
    are in one domain, what has one owner has a copy at another place of it.

    A place is near if it holds layers close to this one: when the pipeline shrinks, the first layers of a stage move to
    the place before, the last ones to the place after.

    Args:
        domains: per place, its failure domain, see `failure_domains.py`.
        parameter_bytes: per layer.
        copies: of each layer, beside one owner.

    Raises:
        ValueError: not one domain per place, or not one size per layer.
    """
    places = plan.world_size
    layers = plan.layers[-1][1]
    if len(domains) != places:
        raise ValueError(f"the plan has {places} places, and {len(domains)} domains are given")
    if len(parameter_bytes) != layers:
        raise ValueError(f"the plan has {layers} layers, and the bytes of {len(parameter_bytes)} are given")
    if plan.shards == 1:  # owners are those of the first pipeline
        rooms = [_Room.of(plan.siblings(rank), domains, copies) for rank in range(plan.pipeline_ranks)]
    else:
        rooms = [_Room.of((place,), domains, copies) for place in range(places)]
    distances = _distances(plan, parameter_bytes)
    ranks = [plan.place(place).rank for place in range(places)]
    ranks_of_room = [np.array(ranks, dtype=np.int64)[room.at] for room in rooms]
    by_piece: list[tuple[_Room, Integers]] = []
    for piece in plan.pieces:
        owner = plan.owner_of(piece)
        by_piece.append((rooms[owner], distances[ranks_of_room[owner], piece.layer]))
    sizes = [parameter_bytes[piece.layer] // piece.shard.of for piece in plan.pieces]
    return tuple(tuple(sorted(chosen)) for chosen in _balanced(by_piece, sizes, places))


@dataclass(frozen=True)
class _Room:
    """Where the copies of one pipeline rank's layers may be."""

    copies: int
    """Number of copies of each layer."""
    places: tuple[int, ...]
    domains: tuple[str, ...]
    """Failure domain of each of `places`."""
    zones: tuple[str, ...]
    """Zone of each of `places` whose zone holds none of the owners; empty for the others."""

    @staticmethod
    def of(owners: Sequence[int], domains: Sequence[str], copies: int) -> _Room:
        """The room for copies of the layers of `owners`."""
        theirs = {domains[place] for place in owners}
        zones = {zone_of(domain) for domain in theirs}
        there = [place for place, domain in enumerate(domains) if domain not in theirs]
        elsewhere = {domains[place] for place in there}
        lacking = min(copies + 1 - len(theirs), len(elsewhere))
        if not elsewhere and len(owners) == 1 and copies:
            there = [place for place in range(len(domains)) if place not in owners]
            lacking = min(1, len(there))
        named = [zone_of(domains[place]) for place in there]
        return _Room(
            max(0, lacking),
            tuple(there),
            tuple(domains[place] for place in there),
            tuple("" if zone in zones else zone for zone in named),
        )

    @cached_property
    def at(self) -> Integers:
        """`places` as an array."""
        return np.array(self.places, dtype=np.int64)

    def open(self, others: Sequence[int]) -> Integers:
        """The indices of the places for one copy of a layer that has its other copies at the indices `others`,
        ascending."""
        if not others:
            return self._open_first
        return self._open_beside({self.domains[at] for at in others}, {self.zones[at] for at in others})

    @cached_property
    def _open_first(self) -> Integers:
        return self._open_beside(frozenset(), frozenset())

    def _open_beside(self, taken: Set[str], zones: Set[str]) -> Integers:
        free = [index for index, domain in enumerate(self.domains) if domain not in taken]
        apart = [index for index in free if self.zones[index] and self.zones[index] not in zones]
        return np.array(apart or free, dtype=np.int64)


def _distances(plan: Plan, sizes: Sequence[int]) -> Integers:
    """int64[pipeline ranks, layers]: the bytes of the layers between each and the nearest one that the rank holds."""
    sums = np.array([0, *accumulate(sizes)], dtype=np.int64)
    distances = np.full((plan.pipeline_ranks, len(sizes)), sums[-1])
    for (first, stop), owner in zip(plan.layers, plan.stage_ranks, strict=True):
        near = distances[owner]
        near[:first] = np.minimum(near[:first], sums[first] - sums[1 : first + 1])
        near[first:stop] = 0
        near[stop:] = np.minimum(near[stop:], sums[stop:-1] - sums[stop])
    return distances


def _balanced(layers: Sequence[tuple[_Room, Integers]], sizes: Sequence[int], places: int) -> list[list[int]]:
    """Per layer or shard, the places of its copies. Starts with the nearest ones and moves one copy at a time to reduce
    the sum of half the squared loads and of `_NEARNESS` times size times distance.

    Args:
        layers: per layer, the room of its copies and the distance of each place there.
    """
    chosen: list[list[int]] = []
    load = np.zeros(places)
    for (room, near), size in zip(layers, sizes, strict=True):
        indices: list[int] = []
        for _ in range(room.copies):
            allowed = room.open(indices)
            distances = near[allowed]
            nearest = allowed[distances == distances.min()]
            index = int(nearest[load[room.at[nearest]].argmin()] if len(nearest) > 1 else nearest[0])
            indices.append(index)
            load[room.at[index]] += size
        chosen.append(indices)
    farness = [_NEARNESS * near for _, near in layers]
    for _ in range(_ROUNDS):
        moved = False
        for (room, _), far, indices, size in zip(layers, farness, chosen, sizes, strict=True):
            for number in range(len(indices) if size else 0):
                now = indices[number]
                load[room.at[now]] -= size
                allowed = room.open([*indices[:number], *indices[number + 1 :]])
                prices = load[room.at[allowed]] + far[allowed]
                cheapest = int(prices.argmin())
                if prices[cheapest] < load[room.at[now]] + far[now]:
                    indices[number] = int(allowed[cheapest])
                    moved = True
                load[room.at[indices[number]]] += size
        if not moved:
            break
    return [
        [room.places[index] for index in indices] for (room, _), indices in zip(layers, chosen, strict=True)
    ]
