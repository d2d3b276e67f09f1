"""Optimizer states shared out among siblings: of which trained parameters of a layer each of them keeps the states.

Pure. A layer's parameters, in the order in which they lie in memory, are cut into runs of neighbours, one for each
pipeline (ZeRO's first stage: Rajbhandari et al. 2020, section 5.1). The cut follows from the model and the number of
pipelines alone, so that whoever holds a shard of a step holds the same bits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple


class Shard(NamedTuple):
    """Part of a layer's states."""

    number: int
    """The pipeline whose rank keeps it."""
    of: int
    """Shards of the layer."""


WHOLE = Shard(0, 1)
"""All of a layer whose states are not shared out."""


class Piece(NamedTuple):
    """A layer's states, or one shard of them."""

    layer: int
    shard: Shard = WHOLE

    def __str__(self) -> str:
        if self.shard == WHOLE:
            return str(self.layer)
        return f"{self.layer} (shard {self.shard.number} of {self.shard.of})"


def made_of(layer: int, held: Collection[Piece]) -> tuple[Piece, ...]:
    """Pieces of `held` that make up the layer: all of it in one piece, else every shard of one cut. Empty: neither is
    there."""
    counts = {piece.shard.of for piece in held if piece.layer == layer}
    for of in sorted(counts):
        shards = tuple(Piece(layer, Shard(number, of)) for number in range(of))
        if all(piece in held for piece in shards):
            return shards
    return ()


def made_with_weights(layer: int, held: Collection[Piece], weights: Collection[Piece]) -> tuple[Piece, ...]:
    """Pieces of `held` that make up the layer, and where nothing complete is left, of `weights` too: all shards of one
    cut, the one with the smallest share of shards of which only the weights are there. Empty: there is none."""
    there = {*held, *weights}
    cuts = sorted({piece.shard.of for piece in there if piece.layer == layer})
    made = [made_of(layer, [piece for piece in there if piece.shard.of == of]) for of in cuts]

    def lacking(pieces: Collection[Piece]) -> float:
        return sum(piece not in held for piece in pieces) / len(pieces)

    return min(filter(None, made), key=lacking, default=())


def shards_among(pieces: Collection[Piece]) -> tuple[Piece, ...]:
    """`pieces`, ascending, if any of them is a shard; whole layers are named by their numbers alone."""
    return tuple(sorted(pieces)) if any(piece.shard != WHOLE for piece in pieces) else ()


def cut(
    sizes: Sequence[int], layer: int, of: int, whole_at: int | None = None
) -> tuple[tuple[int, int], ...]:
    """Per shard number, its parameters as [first, stop); a shard may have none.

    The largest shard is as small as whole parameters allow. Shard numbers are turned by one from layer to layer: what
    one shard has more than others in each layer evens out over a rank's layers.

    Args:
        sizes: of the layer's trained parameters, in the order in which they lie in memory.
        layer: its position in the model.
        of: shards.
        whole_at: the number of the shard that has all of the layer (`kept_whole`); None: it is cut.
    """
    if whole_at is not None:
        return tuple((0, len(sizes) if number == whole_at else 0) for number in range(of))
    runs = _even_runs(sizes, of)
    return tuple(runs[(number - layer) % of] for number in range(of))


def kept_whole(ties: Iterable[Iterable[int]], of: int) -> dict[int, int]:
    """Layer -> the number of the shard that has all of it, for layers that share parameters: the gradients of all uses
    of a parameter then meet in one pipeline.

    Args:
        ties: per tied parameter, the layers that use it.
        of: shards.
    """
    return {layer: first % of for layer, first in first_of_ties(ties).items()}


def first_of_ties(ties: Iterable[Iterable[int]]) -> dict[int, int]:
    """Layer -> the first of all layers with which it shares parameters, directly or through others."""
    together: list[set[int]] = []
    for group in ties:
        joined = set(group)
        apart = [other for other in together if not other & joined]
        together = [*apart, joined.union(*(other for other in together if other & joined))]
    return {layer: min(layers) for layers in together for layer in layers}


def _even_runs(sizes: Sequence[int], count: int) -> tuple[tuple[int, int], ...]:
    least, most = max(sizes, default=0), sum(sizes)
    while least < most:
        tried = (least + most) // 2
        if len(_filled(sizes, tried)) <= count:
            most = tried
        else:
            least = tried + 1
    runs = _filled(sizes, least)
    return (*runs, *[(len(sizes), len(sizes))] * (count - len(runs)))


def _filled(sizes: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Runs of at most `most` in all, each as long as it can be."""
    runs: list[tuple[int, int]] = []
    first = held = 0
    for number, size in enumerate(sizes):
        if number > first and held + size > most:
            runs.append((first, number))
            first, held = number, 0
        held += size
    return [*runs, (first, len(sizes))] if sizes else runs
