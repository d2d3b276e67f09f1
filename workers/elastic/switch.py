"""A rank's layers and standbys after a switch to another plan, taken from those it has: nothing is copied, and a
standby that takes over has the owner's bits. Knows no channel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner.shards import Piece
from workers.control.next_plan import NextPlan
from workers.elastic.standby import Standbys, live_layers
from workers.freezing.plans import Settings
from workers.layer import Layer
from workers.state.layer_state import LayerState
from workers.state.optim import Optimizer

Built = Mapping[int, tuple[Layer, LayerState]]
"""Layer number -> layer and its live state."""


@dataclass(frozen=True)
class Switched:
    """What a rank has under its new plan."""

    layers: dict[int, tuple[Layer, LayerState]]
    """The layers that it owns."""
    standbys: Standbys
    taken: tuple[int, ...]
    """Layers that it owns now and did not before."""
    given: tuple[int, ...]
    """Layers that it owned before and does not now."""


def take_up(
    following: NextPlan,
    place: int,
    layers: Built,
    standbys: Standbys,
    *,
    freeze: Settings,
    optimizer: Optimizer,
    step: int,
) -> Switched:
    """Return what `place` has under the plan that follows. It must be ready for that plan, and its copies at rest.

    Args:
        layers: the layers that it owned.
        standbys: the copies that it kept. Those that take over, or that the new plan keeps, go on.
        step: the last step committed.
    """
    known = {**live_layers(standbys.held()), **layers}
    owned, copied = following.layers_of(place), following.plan.standbys_of(place)
    return Switched(
        layers={layer: known[layer] for layer in owned},
        standbys=Standbys(
            [Piece(layer) for layer in copied],
            {Piece(layer): known[layer] for layer in copied if layer in known},
            freeze=freeze,
            optimizer=optimizer,
            step=step,
            host=standbys.host,
            known=standbys.held_on_host(),
        ),
        taken=tuple(layer for layer in owned if layer not in layers),
        given=tuple(layer for layer in sorted(layers) if layer not in owned),
    )
