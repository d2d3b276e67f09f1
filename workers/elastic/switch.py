"""A rank's layers and standbys after a switch to another plan, taken from those it has: a standby that takes over has
the owner's bits. Knows no channel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner.plan import Plan
from planner.shards import WHOLE, Piece
from workers.copies.standby import Base, Standbys
from workers.elastic.handover import given_up, taken_up
from workers.freezing.plans import FreezeSettings
from workers.layers.layer import Layer
from workers.state.layer_state import LayerState
from workers.state.optim import Optimizer

Built = Mapping[int, tuple[Layer, LayerState]]
"""Layer number -> layer and its live state."""


@dataclass(frozen=True)
class Switched:
    """Layers and standbys of a rank under its new plan."""

    layers: dict[int, tuple[Layer, LayerState]]
    """The layers that it owns."""
    standbys: Standbys
    taken: tuple[int, ...]
    """Layers that it owns now and did not before."""
    given: tuple[int, ...]
    """Layers that it owned before and does not now."""


def take_up(
    plan: Plan,
    place: int,
    layers: Built,
    standbys: Standbys,
    modules: Mapping[Piece, Layer],
    *,
    freeze: FreezeSettings,
    optimizer: Optimizer,
    step: int,
) -> Switched:
    """Return what `place` has under `plan`, which follows. It must be ready for it, and its copies at rest.

    Args:
        layers: the layers that it owned.
        standbys: the copies that it kept. Those that take over, or that the new plan keeps, go on.
        modules: of the shards that it takes over.
        step: the last step committed.
    """
    own: dict[Piece, Base] = {Piece(layer, one[1].shard): one for layer, one in layers.items()}
    known = {**standbys.held(), **own}
    owned, copied = plan.pieces_of_place(place), plan.copies_at(place)
    return Switched(
        layers={piece.layer: _live(known[piece], modules.get(piece)) for piece in owned},
        standbys=Standbys(
            copied,
            {piece: _copy(piece, known[piece]) for piece in copied if piece in known},
            freeze=freeze,
            optimizer=optimizer,
            step=step,
            host=standbys.host,
            known=standbys.held_on_host(),
            given_up=standbys.given_up,
        ),
        taken=tuple(piece.layer for piece in owned if piece not in own),
        given=tuple(piece.layer for piece in sorted(own) if piece not in owned),
    )


def _live(base: Base, module: Layer | None) -> tuple[Layer, LayerState]:
    layer, state = base
    if layer is not None:
        return layer, state
    assert module is not None, f"layer {state.layer} has no module yet"
    return module, taken_up(module, state)


def _copy(piece: Piece, base: Base) -> Base:
    layer, state = base
    return base if layer is None or piece.shard == WHOLE else (None, given_up(state))
