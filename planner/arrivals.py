"""Which layers' state must come to which places before one plan can follow another in the same places. Pure."""

from __future__ import annotations

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
