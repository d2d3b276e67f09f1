"""Sums gradients across ranks before a commit: those of replicas, and those of tied parameters.

Every sum has one order (replicas ascending, then layers ascending) and is computed by exchange, never by a
library's reduction, so that siblings and tied copies hold the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from planner.shares import ReplicaPart
from workers.layers.backward import gradient_of
from workers.reproducibility.canonical import canonical
from workers.state.flat import NO_GRADIENTS, Cut, FlatGradients, GradientBuffers
from workers.transport.channel import Channel, MessageStream

Parameters = dict[tuple[int, str], nn.Parameter]
"""(layer, name within the layer) -> parameter, in order of layer and name."""

NO_CUTS: Mapping[int, Sequence[Cut]] = {}

APART = 64
"""Ranges of a layer that siblings sum begin at multiples of so many elements."""
AHEAD = 4
"""Number of layers whose parts are sent before the first layer is summed up: enough to keep links busy, few enough to
cost little memory."""


@dataclass(frozen=True)
class TiedUse:
    """One use of a tied parameter: a copy of it in one layer."""

    layer: int
    name: str
    rank: int
    """The pipeline rank that holds the layer."""


class ReplicaExchange:
    """Sums the gradients of one pipeline rank's layers over all replicas. Its siblings share the work.

    Of each layer, every sibling gathers an equal range, sums it, and sends it back: the parts of each replica in their
    order, then the replicas in theirs. Where siblings share out the layer's states, each sums its own shard, and keeps
    the sums.

    Args:
        siblings: places that hold the same layers, by pipeline.
        layers: layer -> where its gradients are summed.
        tags: first free tag on the channel.
        parts: of all replicas, in order of summation; see `planner.shares`.
        cuts: layer -> its shards by number, where siblings share out its states.
    """

    def __init__(
        self,
        channel: Channel,
        siblings: Sequence[int],
        layers: Mapping[int, GradientBuffers],
        tags: int,
        parts: Sequence[ReplicaPart],
        cuts: Mapping[int, Sequence[Cut]] = NO_CUTS,
    ) -> None:
        self._taken: dict[ReplicaPart, dict[int, FlatGradients]] = {}
        """The gradients of the own parts, while they are summed."""
        self._totals: dict[int, list[Tensor]] = {}
        """Layer -> what this sibling sums of it, so far, where replicas are summed in several turns."""
        self._names: dict[int, frozenset[str]] = {}
        """Layer -> the parameters of which any replica so far has a gradient."""
        self.prefix = 0
        """Layers of the model, from the first on, of which nobody has a gradient in this step; nothing is said of them.
        """
        self._cuts = cuts
        self._channel = channel
        self._siblings = tuple(siblings)
        self._all = self._parts = tuple(parts)
        """All, and those that are summed now."""
        self._own = self._siblings.index(channel.rank)
        self._others = [r for r in range(len(self._siblings)) if r != self._own]
        self._layers = {layer: summed for layer, summed in sorted(layers.items()) if summed.names}
        self._number = {layer: number for number, layer in enumerate(self._layers)}
        self._tags = tags

    @property
    def own_parts(self) -> list[ReplicaPart]:
        """The parts that this pipeline executes."""
        return [part for part in self._all if part.pipeline == self._own]

    def sum(self, taken: Mapping[ReplicaPart, Mapping[int, FlatGradients]]) -> None:
        """Have each layer's parameters, or those of the own shard, have the sum over replicas; a gradient absent
        everywhere stays absent.

        Args:
            taken: part -> layer -> its gradients, if there are any; their memory is used up.
        """
        self.add(taken, self._all, last=True)

    def add(
        self,
        taken: Mapping[ReplicaPart, Mapping[int, FlatGradients]],
        parts: Sequence[ReplicaPart],
        *,
        last: bool,
    ) -> None:
        """Add whole replicas to the sum of those before them; with the last ones, as `sum`. All siblings call it
        together.

        Args:
            taken: part -> layer -> its gradients, as for `sum`.
            parts: of these replicas, in order of summation.
        """
        self._parts = tuple(parts)
        self._taken = {
            part: {layer: taken.get(part, {}).get(layer, NO_GRADIENTS) for layer in self._layers}
            for part in self._parts_of(self._own)
        }
        present = self._agree_on_presence()
        there = {layer for layer in self._layers if any(present[part][layer] for part in self._parts)}
        first = not self._names
        self._names = {
            layer: self._names.get(layer, frozenset()).union(*(present[part][layer] for part in self._parts))
            for layer in self._layers
        }
        layers = [layer for layer in self._layers if layer in there or layer in self._totals]
        turns = [(sent if sent in there else None, *others) for sent, *others in _turns(layers)]
        groups = [
            group for sent, summed, _ in turns for group in self._groups(sent, summed if last else None)
        ]
        self._channel.window([group for group in groups if group])
        totals: dict[int, list[Tensor]] = {}
        for sent, summed, done in turns:
            if sent is not None:
                self._mark_absent(sent, present)
                for sibling in self._others:
                    self._send(self._parts_stream(sent, self._own, sibling), self._cut(sent, sibling))
            if summed is not None:
                totals[summed] = self._total(summed, present=summed in there, first=first)
                for sibling in () if summed in self._cuts or not last else self._others:
                    self._send(self._sum_stream(summed, self._own, sibling), totals[summed])
            if done is not None and last:
                self._put_total(done, totals.pop(done))
        self._channel.flush()
        self._taken, self._totals = {}, totals
        if last:
            self._names = {}

    def drop(self) -> None:
        """Drop what a sum that broke off has left."""
        self._taken, self._totals, self._names = {}, {}, {}

    def _groups(self, sent: int | None, summed: int | None) -> Iterator[list[MessageStream]]:
        """The streams of one turn that begin or end here, those together whose messages travel together."""
        if sent is not None:
            yield [
                self._parts_stream(sent, source, target)
                for source, target in self._exchanges()
                if self._ranges(sent, target) and self._parts_of(source)
            ]
        if summed is not None and summed not in self._cuts:
            yield [
                self._sum_stream(summed, source, target)
                for source, target in self._exchanges()
                if self._ranges(summed, source)
            ]

    def _exchanges(self) -> Iterator[tuple[int, int]]:
        """(source, target) of what this pipeline sends and receives."""
        for sibling in self._others:
            yield self._own, sibling
            yield sibling, self._own

    def _parts_of(self, sibling: int) -> list[ReplicaPart]:
        return [part for part in self._parts if part.pipeline == sibling]

    def _mark_absent(self, layer: int, present: Mapping[ReplicaPart, Mapping[int, frozenset[str]]]) -> None:
        """Have what is absent in a part change nothing in the sum of its replica: nothing was added for it. A replica
        without a gradient has zeros."""
        layouts = self._layers[layer].layouts
        for part in self._taken:
            if not self._taken[part][layer].buffers:
                self._taken[part][layer] = self._layers[layer].zeros()
            replicas = [present[other][layer] for other in self._parts if other.replica == part.replica]
            lacking = frozenset().union(*replicas) - present[part][layer]
            for layout, buffer in zip(layouts, self._taken[part][layer].buffers, strict=True):
                for place in layout.places:
                    if place.name in lacking:
                        buffer[place.begin : place.stop].fill_(-0.0)

    def _ranges(self, layer: int, sibling: int) -> list[tuple[int, slice]]:
        """(buffer, elements) of the layer that `sibling` sums."""
        if layer in self._cuts:
            return list(self._cuts[layer][sibling].parts)
        found: list[tuple[int, slice]] = []
        for number, layout in enumerate(self._layers[layer].layouts):
            each = -(-layout.size // (len(self._siblings) * APART)) * APART
            begin, stop = (min(layout.size, each * n) for n in (sibling, sibling + 1))
            if begin < stop:
                found.append((number, slice(begin, stop)))
        return found

    def _cut(self, layer: int, sibling: int) -> list[Tensor]:
        """Gradients of this pipeline that `sibling` sums: by part, and for each by buffer."""
        return [
            of_part[layer].buffers[number][elements]
            for of_part in self._taken.values()
            for number, elements in self._ranges(layer, sibling)
        ]

    def _total(self, layer: int, *, present: bool, first: bool) -> list[Tensor]:
        """The sum over replicas of what this sibling sums, by buffer; some of it in the memory of what is summed.

        Args:
            present: whether any of the replicas at hand has a gradient of the layer.
            first: whether no replica was summed before them.
        """
        count, before = len(self._ranges(layer, self._own)), self._totals.get(layer)
        if not count:
            return []
        if not present:
            assert before is not None
            return [total.add_(0.0) for total in before]  # these replicas have zeros
        pieces: dict[ReplicaPart, Sequence[Tensor]] = {}
        for sibling in range(len(self._siblings)):
            if not self._parts_of(sibling):
                continue
            if sibling == self._own:
                received: Sequence[Tensor] = self._cut(layer, self._own)
            else:
                received = self._channel.receive(self._parts_stream(layer, sibling, self._own))
            for number, part in enumerate(self._parts_of(sibling)):
                pieces[part] = received[number * count : (number + 1) * count]
        totals: list[Tensor] = []
        for number in range(count):
            of_replicas = [
                _added_up(pieces[part][number] for part in of_replica)
                for _, of_replica in groupby(self._parts, key=lambda part: part.replica)
            ]
            if before is not None:
                of_replicas.insert(0, before[number])
            elif not first:
                of_replicas[0].add_(0.0)  # those before have zeros
            totals.append(_added_up(of_replicas))
        return totals

    def _put_total(self, layer: int, own: Sequence[Tensor]) -> None:
        """Put the siblings' sums together, or with shards the own ones, in the memory of this pipeline's last part.
        Others' sums prove that what was sent of it has arrived."""
        buffers = next((of_part[layer].buffers for of_part in reversed(self._taken.values())), ())
        buffers = buffers or self._layers[layer].zeros().buffers
        cuts = self._cuts.get(layer)
        for sibling in range(len(self._siblings)) if cuts is None else (self._own,):
            ranges = self._ranges(layer, sibling)
            if not ranges:
                continue
            theirs = self._sum_stream(layer, sibling, self._own)
            sums = own if sibling == self._own else self._channel.receive(theirs)
            for (number, elements), total in zip(ranges, sums, strict=True):
                target = buffers[number][elements]
                if target.data_ptr() != total.data_ptr():
                    target.copy_(total)
        names = self._names[layer]
        if cuts is not None:
            names &= set(cuts[self._own].names)
        summed = self._layers[layer]
        summed.put(FlatGradients.of(summed.layouts, buffers, names))

    def _agree_on_presence(self) -> dict[ReplicaPart, dict[int, frozenset[str]]]:
        """Part -> layer -> the parameters of which its pipeline has a gradient."""
        trained = [(layer, summed) for layer, summed in self._layers.items() if layer >= self.prefix]
        places = [(layer, name) for layer, summed in trained for name in summed.names]
        own = list(self._taken)
        there = [[name in self._taken[part][layer] for layer, name in places] for part in own]
        mine = torch.tensor(there, dtype=torch.bool).reshape(len(own), len(places))
        for sibling in self._others if own and places else ():
            self._channel.send(self._stream(self._own, sibling, 0), (mine,))
        rows = dict(zip(own, there, strict=True))
        for sibling in self._others:
            parts = self._parts_of(sibling)
            theirs: list[list[bool]] = [[] for _ in parts]
            if parts and places:
                theirs = self._channel.receive(self._stream(sibling, self._own, 0))[0].cpu().tolist()
            rows.update(zip(parts, theirs, strict=True))
        found: dict[ReplicaPart, dict[int, frozenset[str]]] = {}
        for part, row in rows.items():
            names: dict[int, set[str]] = {layer: set() for layer in self._layers}
            for (layer, name), is_there in zip(places, row, strict=True):
                if is_there:
                    names[layer].add(name)
            found[part] = {layer: frozenset(of_layer) for layer, of_layer in names.items()}
        return found

    def _send(self, stream: MessageStream, tensors: Sequence[Tensor]) -> None:
        if tensors:
            self._channel.send(stream, tensors)

    def _parts_stream(self, layer: int, source: int, target: int) -> MessageStream:
        return self._stream(source, target, 1 + 2 * self._number[layer])

    def _sum_stream(self, layer: int, source: int, target: int) -> MessageStream:
        return self._stream(source, target, 2 + 2 * self._number[layer])

    def _stream(self, source: int, target: int, tag: int) -> MessageStream:
        return MessageStream(
            self._siblings[source],
            self._siblings[target],
            self._tags + tag,
            f"gradients pipeline {source} -> {target}",
        )


def _turns(layers: Sequence[int]) -> Iterator[tuple[int | None, int | None, int | None]]:
    """Exchange order, in layers: (one whose parts are sent, one summed up, one whose sums are put together)."""
    for number in range(-AHEAD, len(layers) + AHEAD):
        turn = (number + AHEAD, number, number - AHEAD)
        sent, summed, done = (layers[n] if 0 <= n < len(layers) else None for n in turn)
        yield sent, summed, done


def _added_up(gradients: Iterable[Tensor]) -> Tensor:
    """Their sum in that order, in the memory of the first."""
    first, *others = gradients
    for gradient in others:
        first.add_(gradient)
    return first


class TieExchange:
    """Gives every copy of a tied parameter the sum of the gradients of all its uses, in layer order.

    Args:
        groups: per tied parameter, its uses in layer order.
        base: global rank of this pipeline's rank 0.
        tags: first free tag on the channel.
    """

    def __init__(
        self,
        channel: Channel,
        groups: Sequence[Sequence[TiedUse]],
        parameters: Parameters,
        base: int,
        tags: int,
    ) -> None:
        self._channel = channel
        self._rank = channel.rank - base
        self._base = base
        self._parameters = parameters
        self._groups = [list(g) for g in groups]
        self._tags = tags

    def sum(self) -> None:
        """Replace each tied copy's `.grad` with the sum over its uses; absent everywhere stays absent."""
        if not self._groups:
            return
        mine = [(tag, group) for tag, group in self._tagged() if any(use.rank == self._rank for use in group)]
        self._channel.window([streams for tag, group in mine if (streams := self._streams(group, tag))])
        for tag, group in mine:
            for number, use in enumerate(group):
                if use.rank == self._rank:
                    self._tell(use, group, tag + number)
        for tag, group in mine:
            self._sum_group(group, tag)
        self._channel.flush()

    def _tagged(self) -> list[tuple[int, list[TiedUse]]]:
        tagged, tag = [], self._tags
        for group in self._groups:
            tagged.append((tag, group))
            tag += len(group)
        return tagged

    def _tell(self, use: TiedUse, group: list[TiedUse], tag: int) -> None:
        parameter = self._parameters[use.layer, use.name]
        present = torch.tensor([parameter.grad is not None], device=parameter.device)
        grad = canonical(gradient_of(parameter))
        for target in _other_ranks(use, group):
            self._channel.send(self._stream(use, target, tag), (present, grad))

    def _streams(self, group: Sequence[TiedUse], tag: int) -> list[MessageStream]:
        """Streams of one tied parameter that begin or end here."""
        return [
            self._stream(use, target, tag + number)
            for number, use in enumerate(group)
            for target in _other_ranks(use, group)
            if self._rank in (use.rank, target)
        ]

    def _sum_group(self, group: list[TiedUse], tag: int) -> None:
        total: Tensor | None = None
        for number, use in enumerate(group):
            if use.rank == self._rank:
                grad = self._parameters[use.layer, use.name].grad
                grad = None if grad is None else canonical(grad)
            else:
                present, grad = self._channel.receive(self._stream(use, self._rank, tag + number))
                grad = grad if bool(present) else None
            if grad is not None:
                total = grad.clone() if total is None else total.add_(grad)
        if total is None:
            return
        for use in group:
            if use.rank == self._rank:
                # Not in place: the use's own gradient may still be in flight to the others.
                self._parameters[use.layer, use.name].grad = total

    def _stream(self, use: TiedUse, target: int, tag: int) -> MessageStream:
        return MessageStream(
            self._base + use.rank, self._base + target, tag, f"tied gradient of layer {use.layer}"
        )


def _other_ranks(use: TiedUse, group: Iterable[TiedUse]) -> list[int]:
    """The ranks that hold other uses of a tied parameter."""
    return sorted({other.rank for other in group} - {use.rank})
