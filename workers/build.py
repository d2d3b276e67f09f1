"""Builds only the layers that one rank holds, each with its own random key."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from planner.shards import WHOLE, Shard, cut, kept_whole
from workers.layers.blamed import blamed
from workers.layers.deferred.queue import Workspace
from workers.layers.layer import Layer
from workers.layers.sharded_weights import ComputeWeights
from workers.models.definition import ModelDefinition, ParameterRef
from workers.protocol.errors import JobError
from workers.reproducibility import rng
from workers.reproducibility.keyed_in_turns import keyed_in_turns
from workers.state.flat import Flat, Layout, cuts_of
from workers.state.hidden import aliases_of
from workers.state.layer_state import LayerState, apart, host_copy, shard_of, slots_of
from workers.state.optim import Optimizer
from workers.state.own_memory import unfold_
from workers.state.precision import cast_fixed_, cast_parameters


def build_module(
    definition: ModelDefinition, layer: int, seed: int, *, beside_training: bool = False
) -> nn.Module:
    """Layer number `layer`, built on the CPU with the initial values that `seed` determines.

    A tied parameter gets the initial value of the first use in its group, whichever rank holds that.

    Args:
        beside_training: another thread of this process trains and must not wait for the entire build. The
            values are the same.
    """
    builder = definition.layers[layer]
    module = _keyed_build(definition, layer, seed, beside_training)
    for group in definition.ties:
        first = group[0]
        for use in group[1:]:
            if use.layer == builder.name:
                owner = definition.names.index(first.layer)
                source = _parameter(_keyed_build(definition, owner, seed, beside_training), first)
                target = _parameter(module, use)
                if source.shape != target.shape:
                    raise JobError(
                        f"{first} {tuple(source.shape)} and {use} {tuple(target.shape)} are tied but differ in shape"
                    )
                with torch.no_grad():
                    target.copy_(source)
    for kind, own in ("parameter", module.named_parameters()), ("buffer", module.named_buffers()):
        if unmade := [name for name, tensor in own if tensor.is_meta]:
            raise JobError(
                f"{kind} {unmade[0]} of layer {builder.name} is on the meta device, without values: make it on the CPU,"
                " or hold what is only a sketch in a list, which is no part of the module"
            )
    return module


def _keyed_build(definition: ModelDefinition, layer: int, seed: int, beside_training: bool) -> nn.Module:
    builder = definition.layers[layer]
    draw_key = rng.key(seed, "init", builder.name)
    with keyed_in_turns(draw_key) if beside_training else rng.keyed(draw_key):
        return builder.build()


def _parameter(module: nn.Module, ref: ParameterRef) -> nn.Parameter:
    try:
        return module.get_parameter(ref.parameter)
    except AttributeError as error:
        raise JobError(
            f"the model ties {ref}, but layer {ref.layer} has no parameter {ref.parameter}"
        ) from error


def build_layers(
    definition: ModelDefinition,
    layers: Iterable[int],
    *,
    seed: int,
    precision: str,
    device: torch.device,
    optimizer: Optimizer,
    beside_training: bool = False,
    shard: Shard = WHOLE,
    workspace: Workspace | None = None,
) -> dict[int, tuple[Layer, LayerState]]:
    """The given layers on `device`, with fresh optimizer state; `beside_training` as in `build_module`.

    Args:
        shard: of their states, the part that this rank keeps.
        workspace: that they share with others; None: one of their own.
    """
    workspace = workspace or Workspace()
    whole_at = kept_whole(definition.tied_layers, shard.of)
    built: dict[int, tuple[Layer, LayerState]] = {}
    for index in layers:
        built[index] = assembled(
            index,
            definition.layers[index].name,
            build_module(definition, index, seed, beside_training=beside_training).to(device),
            precision=precision,
            device=device,
            optimizer=optimizer,
            workspace=workspace,
        )
        if shard != WHOLE:
            built[index] = _shared(*built[index], shard, whole_at.get(index), optimizer)
    return built


def _shared(
    layer: Layer, state: LayerState, shard: Shard, whole_at: int | None, optimizer: Optimizer
) -> tuple[Layer, LayerState]:
    """A layer of whose states this rank keeps one shard alone."""
    layouts = layer.summed.layouts
    sizes = [place.stop - place.begin for layout in layouts for place in layout.places]
    cuts = cuts_of(layouts, cut(sizes, layer.index, shard.of, whole_at))
    buffers = [flat.weights if flat.cast is None else flat.cast for flat in state.flats]
    trained = [parameter for parameter in layer.module.parameters() if parameter.requires_grad]
    layer.shared = ComputeWeights(trained, buffers, cuts, shard.number)
    return layer, shard_of(state, cuts, shard.number, optimizer.slot_names())


def sibling_shard(layer: Layer, state: LayerState, number: int, *, on_host: bool) -> LayerState:
    """The state of shard `number` of a layer of which this rank keeps another one: in memory of its own, of zeros, with
    the buffers and fixed parameters of `state` and without statistics.

    Args:
        state: this rank's shard; live.
        on_host: in host memory, also where this rank computes on a GPU.
    """
    assert layer.shared is not None
    cut = layer.shared.cuts[number]

    def zeros(layout: Layout, like: Tensor) -> Tensor:
        return torch.zeros(layout.size, dtype=like.dtype, device="cpu" if on_host else like.device)

    flats = tuple(
        Flat(
            layout,
            zeros(layout, flat.weights),
            {slot: zeros(layout, one) for slot, one in flat.slots.items()},
        )
        for layout, flat in zip(cut.layouts, state.flats, strict=True)
    )
    trained = state.updates.keys() | state.elsewhere
    kept = replace(
        state,
        weights=state.fixed,
        slots={},
        updates={},
        freezing={},
        flats=(),
        shard=Shard(number, state.shard.of),
        elsewhere=frozenset(trained - {*cut.names}),
    )
    kept = host_copy(kept) if on_host else apart(kept)
    views = {name: view for flat in flats for name, view in flat.layout.views(flat.weights).items()}
    return replace(
        kept,
        weights={**kept.weights, **views},
        slots=slots_of(flats, cut.names),
        updates=dict.fromkeys(cut.names, 0),
        flats=flats,
    )


def assembled(
    index: int,
    name: str,
    module: nn.Module,
    *,
    precision: str,
    device: torch.device,
    optimizer: Optimizer,
    workspace: Workspace,
) -> tuple[Layer, LayerState]:
    """The layer of a module that is on `device`, with fresh optimizer state.

    Raises:
        JobError: the module cannot train; names the layer.
    """
    with blamed(f"the change of layer {name} to training mode"):
        module.train()
    with blamed(f"the look at what layer {name} holds"):
        aliases = aliases_of(module)
        unfold_(module)
    casts = cast_parameters(module, precision)
    cast_fixed_(module, casts)
    state = LayerState.of(index, name, module, optimizer, casts)
    layer = Layer(index, name, module, precision=precision, device=device, workspace=workspace)
    layer.aliases = aliases
    return layer, state
