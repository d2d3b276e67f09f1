"""Which layers' state must come to which places before one plan can follow another in the same places. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.plan import Plan


def arrivals(now: Plan, then: Plan) -> tuple[tuple[int, int], ...]:
    """(layer, place): the places that own a layer under `then` and have neither it nor a copy under `now`."""
    return tuple(
        (layer, place)
        for layer in range(now.layers[-1][1])
        for place in then.owners_of(layer)
        if place not in (*now.owners_of(layer), *now.copies_of(layer))
    )


def new_copies(now: Plan, then: Plan) -> tuple[tuple[int, int], ...]:
    """(layer, place): the places that keep a copy of a layer under `then` and have neither it nor a copy under
    `now`."""
    return tuple(
        (layer, place)
        for layer in range(now.layers[-1][1])
        for place in then.copies_of(layer)
        if place not in (*now.owners_of(layer), *now.copies_of(layer))
    )


def copied_ahead(now: Plan, members: Sequence[int], then: Plan, lineup: Sequence[int]) -> Plan:
    """`now`, with copies of each layer at those ranks that will own it, or keep a copy of it, under `then`.

    Args:
        members: the ranks under `now`, by place; there may be more than `now` has places.
        lineup: the ranks under `then`, by place; a rank that is not among `members` gets no copies.
    """
    copies = [set(now.copies_of(layer)) for layer in range(now.layers[-1][1])]
    place_of = {rank: place for place, rank in enumerate(members)}
    for new_place, rank in enumerate(lineup[: then.world_size]):
        place = place_of.get(rank)
        if place is None:
            continue
        owned = set(now.layers_of_place(place))
        for layer in {*then.layers_of_place(new_place), *then.standbys_of(new_place)} - owned:
            copies[layer].add(place)
    standbys = tuple(tuple(sorted(places)) for places in copies) if any(copies) else ()
    return replace(now, standbys=standbys)
