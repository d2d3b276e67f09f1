"""Memory that each layer keeps of one microbatch, given which layers recompute: the rule about inputs and outputs.

`workers/layers/layer.py` in numbers. A layer's pass keeps its inputs and its outputs. On one rank the outputs of a
layer are the inputs of the next, and a profile counts them with the layer that made them. Partition programs and the
simulated memory add up these numbers. Knows no cut and no time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from planner.profile import LayerProfile


@dataclass(frozen=True, kw_only=True)
class LayerMemory:
    """Bytes of one layer and one microbatch."""

    kept: int
    """From its forward on, where the layer before it is on the same rank."""
    arriving: int
    """Bytes more where its input comes from another rank."""
    rebuilt: int
    """Bytes that its recompute adds; 0 where it does not recompute."""


def layer_memory(layers: Sequence[LayerProfile], recompute: Collection[int]) -> tuple[LayerMemory, ...]:
    """Per layer, what it keeps where the layers `recompute` keep only their inputs."""
    return tuple(_of_layer(layers, index, frozenset(recompute)) for index in range(len(layers)))


def _of_layer(layers: Sequence[LayerProfile], index: int, recompute: frozenset[int]) -> LayerMemory:
    layer, recomputes = layers[index], index in recompute
    # The profile counts the batch with the first layer's activations; other inputs are the outputs of the layer before.
    kept_elsewhere = not recomputes if index == 0 else index - 1 not in recompute
    own_input = 0 if kept_elsewhere else layer.input_bytes
    rebuilt = 0
    if recomputes:
        # The loss keeps what it saved itself, and the first layer keeps its batch.
        saved_by_loss = layer.loss_bytes - layer.loss_input_bytes
        rebuilt = layer.activation_bytes - saved_by_loss - (layer.input_bytes if index == 0 else 0)
    return LayerMemory(
        kept=own_input + (layer.loss_bytes if recomputes else layer.activation_bytes),
        arriving=layer.input_bytes - own_input if index else 0,
        rebuilt=rebuilt,
    )
