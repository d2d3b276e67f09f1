"""Whole layers for checkpoints and digests, where siblings share out their states.

Each layer is put together by one of them, the layers in turn, so that writing is shared out as well. One at a time: a
rank holds no more than one layer beside its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from planner.shards import Shard
from workers.layers.sharded_weights import ComputeWeights
from workers.protocol.orders import StatePart
from workers.state.flat import Cut
from workers.state.layer_state import LayerState, host_copy, part_of, whole_of
from workers.transport.channel import Channel, MessageStream

TAGS = 2**20
"""More tags than any job has streams between two ranks."""


class Collector:
    """One rank's part in it.

    Args:
        siblings: places that hold the same layers, by pipeline, and so by shard number.
        states: this rank's shards, by layer.
        weights: of the same layers.
        tags: first free tag on the channel; two per layer of the model are used, and others `TAGS` apart: a request may
            switch freezing statistics on between two checkpoints, and a stream's messages have one shape.
    """

    def __init__(
        self,
        channel: Channel,
        siblings: Sequence[int],
        states: Mapping[int, LayerState],
        weights: Mapping[int, ComputeWeights],
        tags: int,
    ) -> None:
        self._channel = channel
        self._siblings = tuple(siblings)
        self._states = dict(sorted(states.items()))
        self._weights = weights
        self._tags = tags
        self._statistics: list[tuple[str, ...]] = []
        """The sets of freezing statistics that layers have had, in the order in which all siblings met them."""

    def collect(self, *, moments: bool) -> list[LayerState]:
        """Host copies of the layers that this rank puts together; all siblings call it together.

        Args:
            moments: whether with optimizer state; else with weights and buffers only.

        Raises:
            ChannelError: a rank is gone.
        """
        own = self._siblings.index(self._channel.rank)
        found: list[LayerState] = []
        for layer, state in self._states.items():
            writer = layer % len(self._siblings)
            mine = state if moments else part_of(state, StatePart.WEIGHTS)
            if writer == own:
                shards = [
                    mine if number == own else self._received(layer, number, moments)
                    for number in range(len(self._siblings))
                ]
                found.append(host_copy(whole_of(shards)))
            elif tensors := _tensors(state, moments):
                self._channel.send(self._stream(layer, own, writer, moments), tensors)
            self._channel.flush()
        return found

    def _received(self, layer: int, number: int, moments: bool) -> LayerState:
        own, cut = self._states[layer], self._weights[layer].cuts[number]
        tensors: Sequence[Tensor] = ()
        if cut.names:
            stream = self._stream(layer, number, layer % len(self._siblings), moments)
            tensors = self._channel.receive(stream)
        return _shard(own, cut, number, tensors, moments)

    def _stream(self, layer: int, source: int, target: int, moments: bool) -> MessageStream:
        statistics = tuple(sorted(self._states[layer].freezing)) if moments else ()
        if statistics not in self._statistics:
            self._statistics.append(statistics)
        return MessageStream(
            self._siblings[source],
            self._siblings[target],
            self._tags + 2 * layer + moments + TAGS * self._statistics.index(statistics),
            f"shard {source} of layer {layer}",
        )


def _tensors(state: LayerState, moments: bool) -> list[Tensor]:
    """Tensors for the writer: each flat buffer's weights; with `moments` also its slots, then the update counts and the
    freezing statistics."""
    found: list[Tensor] = []
    for flat in state.flats:
        if flat.layout.places:
            found += [flat.weights, *(flat.slots.values() if moments else ())]
    if found and moments:
        found.append(torch.tensor(list(state.updates.values()), dtype=torch.int64))
        found += [state.freezing[key] for key in sorted(state.freezing)]
    return found


def _shard(own: LayerState, cut: Cut, number: int, tensors: Sequence[Tensor], moments: bool) -> LayerState:
    """The shard of which a sibling sent `tensors`; `own` is another shard of the layer."""
    coming = iter(tensors)
    weights: dict[str, Tensor] = {}
    slots: dict[str, dict[str, Tensor]] = {name: {} for name in cut.names} if moments else {}
    for flat, layout in zip(own.flats, cut.layouts, strict=True):
        if not layout.places:
            continue
        weights |= layout.views(next(coming))
        for slot in flat.slots if moments else ():
            for name, view in layout.views(next(coming)).items():
                slots[name][slot] = view
    counts: list[int] = next(coming).tolist() if cut.names and moments else []
    freezing: dict[str, Tensor] = {}
    for key in sorted(own.freezing) if moments else ():
        value = own.freezing[key]
        freezing[key] = next(coming) if cut.names else value[:0] if value.dim() else value
    return LayerState(
        layer=own.layer,
        name=own.name,
        weights=weights,
        buffers=own.buffers,
        slots=slots,
        updates=dict(zip(cut.names, counts, strict=bool(counts))),
        freezing=freezing,
        shard=Shard(number, own.shard.of),
        fixed_file=own.fixed_file,
    )
