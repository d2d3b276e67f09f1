"""Sums gradients across ranks before a commit: those of replicas, and those of tied parameters.

Every sum has one order (replicas ascending, then layers ascending) and is computed by exchange, never by a
library's reduction, so that siblings and tied copies hold the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from planner.shares import Part
from workers.backward import gradient_of
from workers.reproducibility.canonical import canonical
from workers.transport.channel import Channel, Stream

Parameters = dict[tuple[int, str], nn.Parameter]
"""(layer, name within the layer) -> parameter, in order of layer and name."""


@dataclass(frozen=True)
class TiedUse:
    """One use of a tied parameter: a copy of it in one layer."""

    layer: int
    name: str
    rank: int
    """The pipeline rank that holds the layer."""


class ReplicaExchange:
    """Sums the gradients of one pipeline rank's layers over all replicas. Its siblings share the work.

    Each tensor is gathered on one sibling, summed there, and sent back: the parts of each replica in their order, then
    the replicas in theirs.

    Args:
        siblings: places that hold the same layers, by pipeline.
        tags: first free tag on the channel.
        parts: of all replicas, in order of summation; see `planner.shares`. None: one per pipeline.
    """

    def __init__(
        self,
        channel: Channel,
        siblings: Sequence[int],
        parameters: Parameters,
        tags: int,
        parts: Sequence[Part] | None = None,
    ) -> None:
        self._taken: dict[Part, list[Tensor | None]] = {}
        self._channel = channel
        self._siblings = tuple(siblings)
        self._parts = parts or [Part(r, 0, 1, r) for r in range(len(self._siblings))]
        self._own = self._siblings.index(channel.rank)
        self._parameters = list(parameters.values())
        self._layers = [layer for layer, _ in parameters]
        self._tags = tags
        load = [0] * len(self._siblings)
        self._reducer: list[int] = []
        for parameter in self._parameters:
            sibling = load.index(min(load))
            load[sibling] += parameter.numel()
            self._reducer.append(sibling)

    def take(self, replica: int) -> None:
        """Set the present gradients aside as those of the whole of `replica`."""
        own = self._parts_of(self._own)
        gradients = [parameter.grad for parameter in self._parameters]
        if replica != own[-1].replica:
            # The next window accumulates its gradients in the same memory.
            gradients = [None if gradient is None else gradient.clone() for gradient in gradients]
        (part,) = (part for part in own if part.replica == replica)
        self._taken[part] = gradients
        for parameter in self._parameters:
            parameter.grad = None

    def put(self, parts: Mapping[Part, Mapping[int, Sequence[Tensor | None]]]) -> None:
        """Take the gradients of `parts`: part -> layer -> by parameter, in order of name."""
        for part, of_layer in parts.items():
            left = {layer: iter(gradients) for layer, gradients in of_layer.items()}
            self._taken[part] = [next(left[layer]) if layer in left else None for layer in self._layers]

    def drop(self) -> None:
        """Drop the gradients that were set aside."""
        self._taken = {}

    def sum(self) -> None:
        """Set each parameter's `.grad` to the sum over replicas; a gradient absent everywhere stays absent.

        If no gradients were set aside, the present ones are those of the pipeline's only replica.
        """
        if not self._taken:
            self.take(self._own)
        others = [r for r in range(len(self._siblings)) if r != self._own]
        present = self._agree_on_presence(others)
        own = self._parts_of(self._own)
        indices = [i for i in range(len(self._parameters)) if any(of[i] for of in present.values())]
        for i in indices:
            if self._reducer[i] != self._own:
                # With zeros for absent ones: a stream's messages all have one shape.
                gradients = [self._taken[part][i] for part in own]
                parts = [
                    self._zeros(i) if gradient is None else canonical(gradient) for gradient in gradients
                ]
                self._channel.send(self._stream(self._own, self._reducer[i], 1 + 2 * i), parts)
        for i in indices:
            if self._reducer[i] == self._own:
                self._reduce(i, others, present)
        for i in indices:
            if self._reducer[i] != self._own:
                stream = self._stream(self._reducer[i], self._own, 2 + 2 * i)
                (self._parameters[i].grad,) = self._channel.receive(stream)
        self._channel.flush()
        self._taken = {}

    def _parts_of(self, sibling: int) -> list[Part]:
        return [part for part in self._parts if part.pipeline == sibling]

    def _reduce(self, i: int, others: Sequence[int], present: Mapping[Part, Sequence[bool]]) -> None:
        parts = {part: self._taken[part][i] for part in self._parts_of(self._own)}
        for sibling in others:
            theirs = self._parts_of(sibling)
            received = self._channel.receive(self._stream(sibling, self._own, 1 + 2 * i))
            parts |= {
                part: gradient for part, gradient in zip(theirs, received, strict=True) if present[part][i]
            }
        total: Tensor | None = None
        for _, of_replica in groupby(self._parts, key=lambda part: part.replica):
            its = self._added_up([parts.get(part) for part in of_replica], i)
            total = its if total is None else total.add_(its)
        assert total is not None
        for sibling in others:
            self._channel.send(self._stream(self._own, sibling, 2 + 2 * i), (total,))
        self._parameters[i].grad = total

    def _added_up(self, gradients: Sequence[Tensor | None], i: int) -> Tensor:
        """The sum of one replica's parts, in new memory. Absent ones are left out: nothing was added for them."""
        there = [canonical(gradient) for gradient in gradients if gradient is not None]
        if not there:
            return self._zeros(i)
        total = there[0].clone()
        for gradient in there[1:]:
            total.add_(gradient)
        return total

    def _zeros(self, i: int) -> Tensor:
        return canonical(torch.zeros_like(self._parameters[i]))

    def _agree_on_presence(self, others: Sequence[int]) -> dict[Part, list[bool]]:
        """Part -> by parameter, whether its pipeline has a gradient of it."""
        own = self._parts_of(self._own)
        there = [[gradient is not None for gradient in self._taken[part]] for part in own]
        mine = torch.tensor(there, dtype=torch.bool).reshape(len(own), len(self._parameters))
        for sibling in others:
            self._channel.send(self._stream(self._own, sibling, 0), (mine,))
        present = dict(zip(own, mine.tolist(), strict=True))
        for sibling in others:
            theirs = self._channel.receive(self._stream(sibling, self._own, 0))[0].cpu().tolist()
            present.update(zip(self._parts_of(sibling), theirs, strict=True))
        return present

    def _stream(self, source: int, target: int, tag: int) -> Stream:
        return Stream(
            self._siblings[source],
            self._siblings[target],
            self._tags + tag,
            f"gradients pipeline {source} -> {target}",
        )


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
        mine = [(tag, group) for tag, group in self._tagged() if any(use.rank == self._rank for use in group)]
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
        present = torch.tensor([parameter.grad is not None])
        grad = canonical(gradient_of(parameter))
        for target in sorted({other.rank for other in group} - {self._rank}):
            self._channel.send(self._stream(use, target, tag), (present, grad))

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

    def _stream(self, use: TiedUse, target: int, tag: int) -> Stream:
        return Stream(self._base + use.rank, self._base + target, tag, f"tied gradient of layer {use.layer}")
