"""States of layers, or shards of them, and the places to which they must come before one plan can follow another in the
same places. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.plan import Plan
from planner.shards import WHOLE, Piece

Arrivals = tuple[tuple[Piece, int], ...]
"""(layer or shard, the place to which it comes)."""


def arrivals(now: Plan, then: Plan) -> Arrivals:
    """Where a piece comes to a place that owns it under `then` and has neither it nor a copy under `now`. Both plans
    have the same pieces."""
    return tuple(
        (piece, place)
        for piece in now.pieces
        for place in then.holders_of(piece)
        if not _has(now, piece, place)
    )


def new_copies(now: Plan, then: Plan) -> Arrivals:
    """Where a piece comes to a place that keeps a copy of it under `then` and has neither it nor a copy under `now`.
    Both plans have the same pieces."""
    return tuple(
        (piece, place) for piece, places in then.copied for place in places if not _has(now, piece, place)
    )


def _has(plan: Plan, piece: Piece, place: int) -> bool:
    return place in plan.holders_of(piece) or place in plan.copies_of_piece(piece)


def needed(now: Plan, then: Plan, place: int) -> tuple[Piece, ...]:
    """The pieces of `now` of which is made what `place` owns and keeps copies of under `then`, ascending.

    Where the two cut layers otherwise, each layer takes all shards of `now`: copies too, because the copies of these
    shards go with the old cut.
    """
    pieces = {*then.pieces_of_place(place), *then.copies_at(place)}
    if now.shards == then.shards:
        return tuple(sorted(pieces))
    layers = {piece.layer for piece in pieces}
    return tuple(piece for piece in now.pieces if piece.layer in layers)


def built_ahead(
    now: Plan, members: Sequence[int], then: Plan, lineup: Sequence[int], *, on_host: bool = False
) -> dict[int, tuple[Piece, ...]]:
    """Per rank, the layers, or shards, that it owns under `then` and for which it has no module under `now`: a copy of
    a shard, or one in host memory, is its state alone. Where the two cut layers otherwise, that is all that it will
    own. Live copies of whole layers, and all that ranks without a place under `now` copy of the same cut, come with
    modules.

    Args:
        members, lineup: as for `copied_ahead`.
        on_host: whether ranks keep copies in host memory.
    """
    place_of = {rank: place for place, rank in enumerate(members[: now.world_size])}
    found: dict[int, tuple[Piece, ...]] = {}
    for new_place, rank in enumerate(lineup[: then.world_size]):
        owned = then.pieces_of_place(new_place)
        if now.shards == then.shards:
            before = {*now.pieces_of_place(place_of[rank])} if rank in place_of else {*owned}
            alone = [piece for piece in owned if on_host or piece.shard != WHOLE]
            owned = tuple(piece for piece in alone if piece not in before)
        if owned:
            found[rank] = owned
    return found


def copied_ahead(now: Plan, members: Sequence[int], then: Plan, lineup: Sequence[int]) -> Plan:
    """`now`, with copies of each layer, or shard, at those ranks that will own it, or keep a copy of it, under `then`.

    Args:
        members: the ranks under `now`, by place; there may be more than `now` has places.
        lineup: the ranks under `then`, by place; a rank that is not among `members` gets no copies.
    """
    copies = {piece: set(now.copies_of_piece(piece)) for piece in now.pieces}
    place_of = {rank: place for place, rank in enumerate(members)}
    for new_place, rank in enumerate(lineup[: then.world_size]):
        place = place_of.get(rank)
        if place is None:
            continue
        owned = set(now.pieces_of_place(place))
        for piece in needed(now, then, new_place):
            if piece not in owned:
                copies[piece].add(place)
    standbys = tuple(tuple(sorted(places)) for places in copies.values()) if any(copies.values()) else ()
    return replace(now, standbys=standbys)
