"""Sizes on a rank of layers whose states siblings share out, as parts of the whole layers' sizes.

`workers/build.py` and `workers/layers/sharded_weights.py` in numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from planner.plan import Plan
from planner.profile import LayerProfile, Profile
from planner.shards import WHOLE, Piece, Shard, cut


def part_of(layer: LayerProfile, piece: Piece) -> float:
    """The part of the layer's trained scalars that is in `piece`; an equal one where their sizes are not known."""
    if piece.shard == WHOLE:
        return 1.0
    whole = sum(layer.trained)
    if not whole:
        return 1 / piece.shard.of
    whole_at = None if layer.tied_from is None else layer.tied_from % piece.shard.of
    first, stop = _cut(layer.trained, piece.layer, piece.shard.of, whole_at)[piece.shard.number]
    return sum(layer.trained[first:stop]) / whole


@lru_cache(maxsize=4096)
def _cut(sizes: tuple[int, ...], layer: int, of: int, whole_at: int | None) -> tuple[tuple[int, int], ...]:
    return cut(sizes, layer, of, whole_at)


def master_bytes(profile: Profile, layer: LayerProfile) -> int:
    """The 32-bit weights beside those in 16 bits, with which the layer computes; part of `parameter_bytes`."""
    return 2 * layer.cast_bytes if profile.model.precision in ("bfloat16", "float16") else 0


def kept_bytes(profile: Profile, plan: Plan, place: int) -> tuple[int, int, int]:
    """(weights, optimizer state, statistics and samples) that the rank at `place` keeps of its own layers."""
    kept = [_kept(profile, piece) for piece in plan.pieces_of_place(place)]
    weights, optimizer, statistics = zip(*kept, strict=True)
    return round(sum(weights)), round(sum(optimizer)), round(sum(statistics))


def _kept(profile: Profile, piece: Piece) -> tuple[float, float, float]:
    layer = profile.model.layers[piece.layer]
    part = part_of(layer, piece)
    return (
        layer.parameter_bytes - (1 - part) * master_bytes(profile, layer),
        part * layer.optimizer_bytes,
        part * (layer.statistics_bytes + layer.sample_bytes),
    )


def sent_bytes(layer: LayerProfile, piece: Piece) -> float:
    """The state of `piece`, as it is sent or copied."""
    return layer.moved_bytes if piece.shard == WHOLE else shard_bytes(layer, piece)


def weight_bytes(profile: Profile, layer: LayerProfile) -> int:
    """The trained weights with which the layer computes: in 16 bits their casts, but for those that stay in 32. None of
    a layer frozen as a whole."""
    return 0 if layer.frozen else layer.gradient_bytes - master_bytes(profile, layer) // 2


def built_ahead_bytes(profile: Profile, now: Plan, then: Plan) -> tuple[int, ...]:
    """Per pipeline rank, what it builds on its device under `now` of layers that it owns under `then`: modules, beside
    copies of its shards of them (copies of whole layers have theirs); and the copies themselves where they are kept in
    a GPU's host."""
    if now.shards != then.shards:
        return (0,) * now.pipeline_ranks
    layers, devices = profile.model.layers, profile.cluster.devices

    def built(rank: int, index: int) -> int:
        layer = layers[index]
        module = layer.parameter_bytes - master_bytes(profile, layer) if now.shards > 1 else 0
        lowered = profile.cluster.refresh_every and devices[rank].kind == "cuda"
        copies = (Piece(index, Shard(number, then.shards)) for number in range(then.shards))
        return module + (max(copied_bytes(layer, copy) for copy in copies) if lowered else 0)

    return tuple(
        sum(built(rank, index) for index in {*then.layers_of_rank(rank)} - {*now.layers_of_rank(rank)})
        for rank in range(now.pipeline_ranks)
    )


def built_bytes(profile: Profile, pieces: Iterable[Piece]) -> int:
    """Device memory of the layers of `pieces` and their states, before they have gradients."""
    return round(sum(sum(_kept(profile, piece)) for piece in pieces))


def copied_bytes(layer: LayerProfile, piece: Piece) -> int:
    """Memory of a copy of `piece` on a standby: its state, and the gradients that arrive."""
    if piece.shard == WHOLE:
        return layer.state_bytes + layer.gradient_bytes
    return round(shard_bytes(layer, piece)) + gradient_bytes(layer, piece)


def shard_bytes(layer: LayerProfile, piece: Piece) -> float:
    """The state of a shard: 32-bit weights, which take as much as gradients, optimizer state and freezing statistics;
    there are no casts."""
    return part_of(layer, piece) * (layer.gradient_bytes + layer.optimizer_bytes + layer.statistics_bytes)


def gradient_bytes(layer: LayerProfile, piece: Piece) -> int:
    """The gradients of `piece`."""
    return round(part_of(layer, piece) * layer.gradient_bytes)


def exchanged_bytes(layer: LayerProfile, piece: Piece) -> int:
    """Gradients of `piece` that a step sends."""
    return 0 if layer.frozen else gradient_bytes(layer, piece)
