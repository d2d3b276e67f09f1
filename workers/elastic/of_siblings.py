"""The shards of siblings in the weights that a rank computes with: what is left of them where the siblings are lost."""

from __future__ import annotations

from planner.shards import Shard
from workers.layers.layer import Layer
from workers.state.layer_state import LayerState


def weights_of_siblings(layer: Layer, state: LayerState) -> list[LayerState]:
    """The other shards of a layer, without moments; none where a rank computes with fewer bits than their owners keep.

    They share memory with the layer's module, and are of the newest commit while `WeightExchange.together`.

    Args:
        state: this rank's shard of the layer; live.
    """
    shared = layer.shared
    if shared is None or any(flat.cast is not None for flat in state.flats):
        return []
    fixed = {name: weight for name, weight in state.weights.items() if name not in state.updates}
    found: list[LayerState] = []
    for number, cut in enumerate(shared.cuts):
        if number == shared.number:
            continue
        weights = dict(fixed)
        for buffer, elements, layout in zip(shared.buffers, cut.ranges, cut.layouts, strict=True):
            weights |= layout.views(buffer[elements])
        found.append(
            LayerState(
                layer=state.layer,
                name=state.name,
                weights=weights,
                buffers=state.buffers,
                slots={},
                updates={},
                shard=Shard(number, len(shared.cuts)),
            )
        )
    return found
