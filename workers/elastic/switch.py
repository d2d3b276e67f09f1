"""What a rank owns and what it stands by for after a switch to another plan, out of what it has: nothing is copied, and
a copy that takes over has the owner's bits. Knows no channel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from workers.config import FreezeConfig
from workers.control.next_plan import NextPlan
from workers.elastic.standby import Standbys
from workers.layer import Layer
from workers.layer_state import LayerState
from workers.optim import Optimizer

Built = Mapping[int, tuple[Layer, LayerState]]
"""Layer number -> layer and its live state."""


@dataclass(frozen=True)
class Switched:
    """What a rank has by its new plan."""

    layers: dict[int, tuple[Layer, LayerState]]
    """That it owns."""
    standbys: Standbys
    taken: tuple[int, ...]
    """Layers that it owns now and did not before."""
    given: tuple[int, ...]
    """And the other way round."""


def take_up(
    following: NextPlan,
    place: int,
    layers: Built,
    standbys: Standbys,
    *,
    freeze: FreezeConfig,
    optimizer: Optimizer,
) -> Switched:
    """What `place` has by the plan that follows; it was ready for that, and its copies rest.

    Args:
        layers: that it owned.
        standbys: the copies that it kept. Those that take over, or that the plan keeps, go on.
    """
    known = {**standbys.held(), **layers}
    owned, copied = following.layers_of(place), following.plan.standbys_of(place)
    return Switched(
        layers={layer: known[layer] for layer in owned},
        standbys=Standbys(
            copied,
            {layer: known[layer] for layer in copied if layer in known},
            freeze=freeze,
            optimizer=optimizer,
        ),
        taken=tuple(layer for layer in owned if layer not in layers),
        given=tuple(layer for layer in sorted(layers) if layer not in owned),
    )
