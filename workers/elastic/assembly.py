"""The layers and copies with which a rank follows an assignment, put together from what it holds, what it has copied
ahead, a checkpoint and other ranks. Knows no channel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from planner.shards import WHOLE, Piece, made_of
from workers.checkpoint.folder import DamagedCheckpointError
from workers.copies.host_copies import HostCopy, HostForm
from workers.copies.standby import Base
from workers.elastic.holdings import Holdings
from workers.elastic.layer_source import Built, Haul, Held, LayerSource, base_of
from workers.layers.layer import Layer
from workers.protocol.errors import StateStreamError
from workers.protocol.orders import Assignment
from workers.state.layer_state import (
    FixedDiffers,
    LayerState,
    apart,
    bytes_of,
    host_copy,
    in_host_memory,
)


@dataclass(frozen=True)
class Assembled:
    """Layers and copies with which a rank can follow an assignment."""

    layers: Built
    """Layers that the rank owns."""
    bases: Mapping[Piece, Base]
    """Bases of the copies that the rank keeps, as far as they are here."""
    spare: Held = field(default_factory=dict)
    """Other states that are here: other ranks may need them."""
    on_host: Mapping[Piece, HostCopy] = field(default_factory=dict)
    """Copies in host memory, which go on."""
    salvaged: Mapping[Piece, LayerState] = field(default_factory=dict)
    """Weights of the layers, or shards of them, whose moments are lost."""
    mixed: frozenset[Piece] = frozenset()
    """Pieces of `layers` whose moments are not those of the step."""


def assemble(
    assignment: Assignment, holdings: Holdings, ahead: Held, source: LayerSource, host: HostForm | None
) -> Assembled:
    """Return what the rank needs for `assignment`.

    Its state comes from `assignment.start`, if given. Otherwise from what the rank holds of `assignment.step` and from
    other ranks; before the first step it is initial.

    Args:
        holdings: receive the layers that arrived if others did not.
        ahead: what was copied ahead.
        source: has begun with the rank's shard.
        host: how the rank keeps copies in host memory; None: it keeps them on its device.

    Raises:
        DamagedCheckpointError: a file of the checkpoint is damaged.
        JobError: the checkpoint is for another model.
        StateStreamError: a source is gone, or `source` was stopped.
    """
    owned = assignment.plan.layers_of_place(assignment.place)
    copied = assignment.plan.copies_at(assignment.place)
    if assignment.start is not None:
        return Assembled(*_begun(owned, copied, partial(source.load, start=assignment.start), host))
    if assignment.step == 0:
        return Assembled(*_begun(owned, copied, source.initial, host))
    return _gathered(assignment, holdings, ahead, source, host)


def _gathered(
    assignment: Assignment, holdings: Holdings, ahead: Held, source: LayerSource, host: HostForm | None
) -> Assembled:
    """Gather the living ranks' state of the assignment's step: this rank's own first, then the others'."""
    owned = assignment.plan.layers_of_place(assignment.place)
    copied = assignment.plan.copies_at(assignment.place)
    shard = assignment.plan.shard_of_place(assignment.place)
    live, on_host = holdings.live(), holdings.on_host()
    holdings.offer()
    held = holdings.of_snapshot(assignment.step) | live | ahead
    layers = {layer: one for layer in owned if (one := _live(held, Piece(layer, shard)))}
    for layer in owned:
        if layer not in layers and (copy := on_host.get(Piece(layer, shard))) is not None:
            layers |= source.build([layer], assignment.step)
            copy.load_into(layers[layer][1])
    bases = _bases([piece for piece in copied if piece not in on_host], held, host)
    lacking = [layer for layer in owned if layer not in layers]
    to_cut = [piece for piece in copied if piece not in on_host and piece not in held]
    for piece, copy in on_host.items():
        if piece.layer in {*lacking, *(each.layer for each in to_cut)}:
            with suppress(MemoryError):
                held[piece] = (None, holdings.newest(copy))
    haul = _haul_of(ahead)
    try:
        source.fetch_all(lacking, assignment, haul, held)
    except (DamagedCheckpointError, StateStreamError):
        holdings.keep(haul, assignment)
        raise
    there = {piece: one[1] for piece, one in held.items()} | haul.pieces
    layers |= haul.whole
    bases |= _bases_cut_anew(to_cut, there, layers, source, assignment.step, host)
    weights = {**holdings.weights_only(), **haul.weights}
    return Assembled(
        layers={layer: layers[layer] for layer in owned},
        bases=bases,
        spare=held | {piece: (None, state) for piece, state in haul.pieces.items()},
        on_host=on_host,
        salvaged={piece: weights[piece] for piece in assignment.salvaged if piece in weights},
        mixed=frozenset(
            piece
            for piece in assignment.plan.pieces_of_place(assignment.place)
            if not assignment.salvaged.isdisjoint(assignment.offered_for(piece))
        ),
    )


def _haul_of(ahead: Held) -> Haul:
    """Layers and shards copied ahead, as if they had been fetched."""
    whole: Built = {}
    pieces: dict[Piece, LayerState] = {}
    for piece, (layer, state) in ahead.items():
        if layer is not None and piece.shard == WHOLE:
            whole[piece.layer] = (layer, state)
        else:
            pieces[piece] = state
    return Haul(whole=whole, pieces=pieces)


def _live(held: Held, piece: Piece) -> tuple[Layer, LayerState] | None:
    """The layer that computes with `piece` here, and its state; None if there is none."""
    layer, state = held.get(piece, (None, None))
    return None if layer is None or state is None else (layer, state)


def _bases(copied: Iterable[Piece], held: Held, host: HostForm | None) -> dict[Piece, Base]:
    """Bases of the pieces of `copied` that are here. A state that arrived from others has no buffers to update, and one
    of a snapshot no fixed parameters: its base comes from its owner, like those that are not here."""
    found: dict[Piece, Base] = {}
    for piece in copied:
        layer, state = held.get(piece, (None, None))
        if state is None:
            continue
        flat = (bool(state.flats) or not state.updates) and not state.leaves_out
        if piece.shard == WHOLE and layer is not None:
            found[piece] = (layer, state)
        elif flat and host is not None:
            with suppress(MemoryError):
                host.check_room(bytes_of(state))
                found[piece] = (None, state if layer is None and in_host_memory(state) else host_copy(state))
        elif flat and piece.shard != WHOLE:
            # That of a live shard is part of the buffer that its module computes with.
            found[piece] = (None, state if layer is None else apart(state))
    return found


def _bases_cut_anew(
    copied: Iterable[Piece],
    there: Mapping[Piece, LayerState],
    layers: Built,
    source: LayerSource,
    step: int,
    host: HostForm | None,
) -> dict[Piece, Base]:
    """Bases of the pieces of `copied` whose layers are here in pieces of another cut: until a copy could come from the
    owner, only that would have the piece.

    Args:
        layers: those that this rank owns.
    """
    found: dict[Piece, Base] = {}
    for piece in copied:
        parts = made_of(piece.layer, [each for each in there if each.layer == piece.layer])
        if not parts:
            continue
        states = [there[part] for part in parts]
        with suppress(MemoryError, FixedDiffers):  # it is to come from its owner
            if host is not None:
                host.check_room(sum(map(bytes_of, states)) // piece.shard.of)
            found[piece] = source.base_made_of(
                states, piece, step, layers.get(piece.layer), on_host=host is not None
            )
    return found


def _begun(
    owned: Sequence[int], copied: Sequence[Piece], make: Callable[..., Built], host: HostForm | None
) -> tuple[Built, dict[Piece, Base]]:
    """The layers that it owns and the bases of its copies, as `make` builds layers. Copies of shards, and those in
    host memory, one by one: their modules go at once. What the host has no room for is left out: it is to come from its
    owner, and if there is no room then either, the rank says so."""
    if host is not None:
        return make(owned), _begun_on_host(copied, make, host)
    whole = [piece.layer for piece in copied if piece.shard == WHOLE]
    built = make([*owned, *whole])
    bases: dict[Piece, Base] = {Piece(layer): built[layer] for layer in whole}
    for piece in copied:
        if piece.shard != WHOLE:
            bases[piece] = base_of(make([piece.layer], shard=piece.shard)[piece.layer])
    return {layer: built[layer] for layer in owned}, bases


def _begun_on_host(copied: Sequence[Piece], make: Callable[..., Built], host: HostForm) -> dict[Piece, Base]:
    bases: dict[Piece, Base] = {}
    largest_bytes = 0
    for piece in copied:
        try:
            host.check_room(largest_bytes)
        except MemoryError:
            break
        built = make([piece.layer], shard=piece.shard, on_host=True)[piece.layer]
        bases[piece] = base_of(built, on_host=True)
        largest_bytes = max(largest_bytes, bytes_of(built[1]))
    return bases
