"""Gradients summed microbatch by microbatch over all replicas, each shard by the sibling that owns it
(`pipeline.shard = "gradients"`).

As a layer's gradients of a microbatch are formed, their parts go to the shards' owners, who add them up in one order
for all plans (`planner/rounds.py`). So a rank holds the sum of its own shard, and what is under way of two layers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.control.activity import Activity
from workers.devices.device import Device
from workers.gradients.exchange import NO_CUTS
from workers.gradients.sink import GradientSink
from workers.state.flat import NO_GRADIENTS, Cut, FlatGradients, GradientBuffers, SetAside
from workers.transport.channel import Channel, MessageStream

Tensors = Sequence[Tensor]


@dataclass(frozen=True)
class _UnderWay:
    """One layer's gradients of a round: of a microbatch of each of the first `busy` pipelines."""

    layer: int
    busy: int
    own: FlatGradients | None
    """None: this pipeline has no microbatch in the round."""


class MicrobatchReduceScatter(GradientSink):
    """Reduces gradients over replicas while the backward pass still runs; each shard's owner has the sum of it.

    All siblings that have a microbatch in a round execute the same actions. A rank sends a layer's gradients of a
    round, and before it sends the next layer's it waits for its siblings' of this one, and until its own have left. So
    no rank is ahead of its slowest sibling by more than a layer, and what is under way is bounded. No send waits, and
    no rank waits for ever (docs/decisions/shards.md). With uneven shares siblings execute different actions; then each
    waits at the end of the step alone, and keeps its own gradients until then.

    Args:
        siblings: places that hold the same layers, by pipeline.
        layers: layer -> where its gradients of a microbatch are formed.
        tags: first free tag on the channel; one, and one per layer, are used.
        cuts: layer -> its shards by number, where there is more than one sibling.
        rounds: per window of a step, how many pipelines have a microbatch in its rounds: the first ones.
        order: the layers of which a window forms gradients of a microbatch, one after the other, as often as it does.
        executed_by: with uneven shares, the pipelines of all microbatches in order of summation.
        device: learns how long its actions waited.
    """

    def __init__(
        self,
        channel: Channel,
        siblings: Sequence[int],
        layers: Mapping[int, GradientBuffers],
        tags: int,
        *,
        cuts: Mapping[int, Sequence[Cut]] = NO_CUTS,
        rounds: Sequence[int] = (),
        order: Sequence[int] = (),
        executed_by: Sequence[int] = (),
        device: Device | None = None,
        activity: Activity | None = None,
    ) -> None:
        super().__init__({layer: summed for layer, summed in layers.items() if summed.names})
        self._channel = channel
        self._siblings = tuple(siblings)
        self._own = self._siblings.index(channel.rank)
        self._others = [number for number in range(len(self._siblings)) if number != self._own]
        self._number = {layer: number for number, layer in enumerate(self._layers)}
        self._tags = tags
        self._cuts = cuts
        self._executed_by = tuple(executed_by)
        self._device = device
        self._activity = activity or Activity()
        self._rounds = tuple(rounds)
        self._order = [layer for layer in order if layer in self._layers]
        self._prefix = 0
        self._windows = 0
        """Windows of the step that this pipeline has begun."""
        self._busy = len(self._siblings)
        self._halves: dict[tuple[int, int], SetAside] = {}
        """(layer, microbatch) -> what its input gradient formed, until its weight gradient adds the rest."""
        self._under_way: _UnderWay | None = None
        self._kept: dict[int, list[Tensors]] = {}
        """With uneven shares: layer -> the own shard's part of this pipeline's microbatches, in order."""
        self._totals: dict[int, Tensors] = {}
        """Layer -> the sum so far of what this rank owns of it."""
        self._present: dict[int, set[str]] = {layer: set() for layer in self._layers}
        """Layer -> the parameters of which any microbatch here had a gradient."""

    def begin_step(self, prefix: int) -> None:
        self._prefix = prefix

    def begin_window(self) -> None:
        self._busy = self._rounds[self._windows]
        self._windows += 1

    def begin(self, layer: int, microbatch: int) -> None:
        half = self._halves.pop((layer, microbatch), None)
        if half is not None:
            self._layers[layer].take_back(half)

    def end(self, layer: int, microbatch: int, *, whole: bool) -> None:
        if layer not in self._layers:
            return
        summed = self._layers[layer]
        if not whole:
            self._halves[layer, microbatch] = summed.set_aside()
            return
        formed = summed.taken()
        self._present[layer].update(formed)
        if not formed.buffers:
            formed = summed.zeros()
        _mark_absent(summed, formed)
        self._go_on(layer, formed)

    def so_far(self, layer: int) -> FlatGradients:
        self._complete()
        summed, own = self._layers.get(layer), self._kept.get(layer)
        total = self._totals.get(layer) or (own[0] if own else None)
        if summed is None or total is None:
            return NO_GRADIENTS
        cut = self._cut(layer, self._own)
        layouts = [cut.layouts[number] for number, _ in cut.parts]
        return FlatGradients.of(layouts, total, self._present[layer] & {*cut.names})

    def reduce(self) -> None:
        for busy in self._rounds[self._windows :]:
            self._busy = busy
            for layer in self._order:
                if layer >= self._prefix:
                    self._go_on(layer, None)
        self._complete()
        for layer in self._kept:
            self._add_up_kept(layer)
        present = self._agree_on_presence()
        for layer, summed in self._layers.items():
            cut, total = self._cut(layer, self._own), self._totals.get(layer, ())
            if not self._others:
                summed.put(FlatGradients.of(summed.layouts, total, present[layer]) if total else NO_GRADIENTS)
            elif total:
                summed.put_part(cut, total, present[layer])
        self._channel.flush_apart()
        self._channel.flush()
        self._forget()

    def drop(self) -> None:
        super().drop()
        self._forget()

    def _forget(self) -> None:
        self._under_way, self._windows = None, 0
        self._halves, self._kept, self._totals = {}, {}, {}
        self._present = {layer: set() for layer in self._layers}

    def _go_on(self, layer: int, own: FlatGradients | None) -> None:
        if self._executed_by:
            assert own is not None, "with uneven shares each pipeline executes its own"
            self._send(layer, own)
            self._kept.setdefault(layer, []).append(self._part(layer, own, self._own))
            return
        self._complete()
        for number in self._others:
            if number < self._busy and self._cut(layer, self._own).parts:
                self._channel.expect_next(self._stream(layer, number, self._own))
        if own is not None:
            self._send(layer, own)
        self._under_way = _UnderWay(layer, self._busy, own)
        if not self._others:
            self._complete()

    def _complete(self) -> None:
        """Add up what is under way, once it has come, and wait until what was sent of it has left."""
        now, self._under_way = self._under_way, None
        if now is None:
            return
        begun_s = time.perf_counter()
        with self._activity.waiting():
            for number in range(now.busy):
                self._add(now.layer, number, now.own)
            self._channel.flush_apart()
        if self._device is not None:
            self._device.waited_s += time.perf_counter() - begun_s

    def _add_up_kept(self, layer: int) -> None:
        own = iter(self._kept[layer])
        for number in self._executed_by:
            if number == self._own:
                self._add_part(layer, next(own))
            else:
                self._add(layer, number, None)

    def _add(self, layer: int, number: int, own: FlatGradients | None) -> None:
        """Add what pipeline `number` formed of the own shard."""
        if not self._cut(layer, self._own).parts:
            return
        if number != self._own:
            self._add_part(layer, self._channel.receive(self._stream(layer, number, self._own)))
            return
        assert own is not None
        part = self._part(layer, own, number)
        if layer not in self._totals and self._others:
            part = [each.clone() for each in part]  # the rest of their memory is of no use any more
        self._add_part(layer, part)

    def _add_part(self, layer: int, part: Tensors) -> None:
        total = self._totals.setdefault(layer, part)
        if total is not part:
            for mine, theirs in zip(total, part, strict=True):
                mine.add_(theirs)

    def _send(self, layer: int, formed: FlatGradients) -> None:
        for number in self._others:
            if part := self._part(layer, formed, number):
                self._channel.send_apart(self._stream(layer, self._own, number), part)

    def _part(self, layer: int, formed: FlatGradients, number: int) -> list[Tensor]:
        """Part of the gradients that pipeline `number` owns."""
        return [formed.buffers[buffer][elements] for buffer, elements in self._cut(layer, number).parts]

    def _cut(self, layer: int, number: int) -> Cut:
        if self._others:
            return self._cuts[layer][number]
        layouts = self._layers[layer].layouts
        return Cut(tuple(slice(0, layout.size) for layout in layouts), layouts)

    def _agree_on_presence(self) -> dict[int, set[str]]:
        """Layer -> the parameters of which any pipeline had a gradient."""
        trained = [(layer, summed) for layer, summed in self._layers.items() if layer >= self._prefix]
        places = [(layer, name) for layer, summed in trained for name in summed.names]
        there = torch.tensor([name in self._present[layer] for layer, name in places], dtype=torch.bool)
        for number in self._others if places else ():
            self._channel.send(self._tagged(self._own, number, 0), (there,))
        for number in self._others if places else ():
            there = there | self._channel.receive(self._tagged(number, self._own, 0))[0].cpu()
        found: dict[int, set[str]] = {layer: set() for layer in self._layers}
        for (layer, name), is_there in zip(places, there.tolist(), strict=True):
            if is_there:
                found[layer].add(name)
        return found

    def _stream(self, layer: int, source: int, target: int) -> MessageStream:
        return self._tagged(source, target, 1 + self._number[layer])

    def _tagged(self, source: int, target: int, tag: int) -> MessageStream:
        return MessageStream(
            self._siblings[source],
            self._siblings[target],
            self._tags + tag,
            f"gradients pipeline {source} -> {target}",
        )


def _mark_absent(summed: GradientBuffers, formed: FlatGradients) -> None:
    """Have what this microbatch has no gradient of change nothing in the sum."""
    for layout, buffer in zip(summed.layouts, formed.buffers, strict=True):
        for place in layout.places:
            if place.name not in formed:
                buffer[place.begin : place.stop].fill_(-0.0)
