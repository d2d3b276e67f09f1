"""Device and host memory of standbys: `workers/copies/standby.py` in numbers."""

from __future__ import annotations

from collections.abc import Sequence

from planner.host_copies import PART
from planner.plan import Plan
from planner.profile import Profile
from planner.shards import Piece
from planner.simulation.places import device_of
from planner.simulation.shard_parts import copied_bytes, gradient_bytes, part_of, sent_bytes

GRADIENT_BYTES = 4
"""Gradient bytes of a parameter, in every precision."""


def standby_bytes(profile: Profile, plan: Plan) -> tuple[int, ...]:
    """Per place, memory of the device for its standbys: weights, optimizer state, and the gradients that arrive; of
    those in a GPU's host the one that is being brought up to date. Where states are shared out also the gradients that
    it sends: those of a shard are not the memory in which they were summed."""
    if profile.cluster.refresh_every:
        taken = [
            max((_refreshed_bytes(profile, piece) for piece in kept), default=0)
            if device_of(profile, plan, place).kind == "cuda"
            else _host_bytes(profile, plan, place, kept)
            for place, kept in enumerate(_kept(plan))
        ]
    else:
        taken = [
            sum(copied_bytes(profile.model.layers[piece.layer], piece) for piece in kept)
            for kept in _kept(plan)
        ]
    for piece, places in plan.copied:
        if plan.shards > 1 and places:
            taken[plan.owner_of(piece)] += gradient_bytes(profile.model.layers[piece.layer], piece)
    return tuple(taken)


def standby_host_bytes(profile: Profile, plan: Plan) -> tuple[int, ...]:
    """Per place, host memory of its standbys, where they are kept there: bases, logs, and one more base while that is
    made."""
    if not profile.cluster.refresh_every:
        return (0,) * plan.world_size
    return tuple(_host_bytes(profile, plan, place, kept) for place, kept in enumerate(_kept(plan)))


def log_bytes(sizes: Sequence[int], every: int) -> int:
    """The most that the logs of copies take: each copy gets a new base every `every` steps, at steps that follow from
    its number.

    Args:
        sizes: of one step's gradients, by copy.
    """
    return max(
        sum(((phase + number) % every or every) * size for number, size in enumerate(sizes))
        for phase in range(every)
    )


def _kept(plan: Plan) -> list[list[Piece]]:
    """Per place, what it keeps standbys of."""
    kept: list[list[Piece]] = [[] for _ in range(plan.world_size)]
    for piece, places in plan.copied:
        for place in places:
            kept[place].append(piece)
    return kept


def _host_bytes(profile: Profile, plan: Plan, place: int, kept: Sequence[Piece]) -> int:
    layers = profile.model.layers
    sizes = [gradient_bytes(layers[piece.layer], piece) for piece in kept]
    if device_of(profile, plan, place).kind == "cuda":
        sizes = [_pinned(size) for size in sizes]
    bases = [round(sent_bytes(layers[piece.layer], piece)) for piece in kept]
    return sum(bases) + max(bases, default=0) + log_bytes(sizes, profile.cluster.refresh_every)


def _refreshed_bytes(profile: Profile, piece: Piece) -> int:
    """GPU memory to apply one step after the other to a copy: its state, a step's gradients and their scaled values, as
    much as is there at a time; all of it where freezing looks at whole layers."""
    layer = profile.model.layers[piece.layer]
    base, gradients = sent_bytes(layer, piece), gradient_bytes(layer, piece)
    trained = layer.gradient_bytes // GRADIENT_BYTES
    at_once = 1.0 if layer.statistics_bytes else min(1.0, PART / max(1, part_of(layer, piece) * trained))
    return round(at_once * (base + 2 * gradients))


def _pinned(size: int) -> int:
    """Torch takes pinned memory in powers of two."""
    return 1 << (size - 1).bit_length() if size else 0
