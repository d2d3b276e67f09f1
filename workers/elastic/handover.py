"""A shard that goes from a copy to the state of a layer that computes, and back: nothing is held twice, and only what
lies among the weights of other shards is copied."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from workers.layers.layer import Layer
from workers.state.layer_state import LayerState, saved_tensors


@torch.no_grad()
def taken_up(layer: Layer, copy: LayerState) -> LayerState:
    """The state of `layer`, a fresh one of the same shard, with the values of `copy`: that has its optimizer state, and
    32-bit weights beside casts, from here on. The weights of other shards are still to come.
    """
    shared = layer.shared
    assert shared is not None, f"the states of layer {layer.name} are not shared out"
    flats = []
    for buffer, elements, flat in zip(shared.buffers, shared.own.ranges, copy.flats, strict=True):
        part = buffer[elements]
        part.copy_(flat.weights)
        same = part.dtype == flat.weights.dtype
        flats.append(replace(flat, weights=part) if same else replace(flat, cast=part))
    parameters, buffers = saved_tensors(layer.module)
    for name, buffer in copy.buffers.items():
        buffers[name].copy_(buffer)
    weights: dict[str, Tensor] = {name: parameters[name] for name in copy.weights}
    for name in copy.weights.keys() - copy.updates.keys():
        parameters[name].copy_(copy.weights[name])
    for flat in flats:
        if flat.cast is not None:
            weights |= flat.layout.views(flat.weights)
    return replace(copy, weights=weights, buffers=buffers, flats=tuple(flats))


def given_up(state: LayerState) -> LayerState:
    """The shard `state` without the module that computed with it, whose memory can go."""
    flats = tuple(
        replace(flat, weights=flat.weights.detach().clone() if flat.cast is None else flat.weights, cast=None)
        for flat in state.flats
    )
    weights = {name: weight.detach() for name, weight in state.weights.items()}
    for flat in flats:
        weights |= flat.layout.views(flat.weights)
    return replace(state, weights=weights, flats=flats)
