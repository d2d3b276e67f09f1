"""Sums gradients across ranks before a commit: those of replicas, and those of tied parameters.

Every sum has one order (replicas ascending, then layers ascending) and is computed by exchange, never by a
library's reduction, so that siblings and tied copies hold the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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

    Each tensor is gathered on one sibling, summed there in replica order, and sent back.

    Args:
        siblings: places that hold the same layers, by pipeline.
        tags: first free tag on the channel.
        replicas: their number; pipeline p runs those with r % pipelines == p. None: one per pipeline.
    """

    def __init__(
        self,
        channel: Channel,
        siblings: Sequence[int],
        parameters: Parameters,
        tags: int,
        replicas: int | None = None,
    ) -> None:
        self._replicas = replicas or len(siblings)
        self._parts: dict[int, list[Tensor | None]] = {}
        self._channel = channel
        self._siblings = tuple(siblings)
        self._own = self._siblings.index(channel.rank)
        self._parameters = list(parameters.values())
        self._tags = tags
        load = [0] * len(self._siblings)
        self._reducer: list[int] = []
        for parameter in self._parameters:
            sibling = load.index(min(load))
            load[sibling] += parameter.numel()
            self._reducer.append(sibling)

    def take(self, replica: int) -> None:
        """Set the present gradients aside as those of `replica`."""
        gradients = [parameter.grad for parameter in self._parameters]
        if replica != self._replicas_of(self._own)[-1]:
            # The next window accumulates its gradients in the same memory.
            gradients = [None if gradient is None else gradient.clone() for gradient in gradients]
        self._parts[replica] = gradients
        for parameter in self._parameters:
            parameter.grad = None

    def drop(self) -> None:
        """Drop the gradients that were set aside."""
        self._parts = {}

    def sum(self) -> None:
        """Set each parameter's `.grad` to the sum over replicas; a gradient absent everywhere stays absent.

        If no gradients were set aside, the present ones are those of the pipeline's only replica.
        """
        if not self._parts:
            self.take(self._own)
        others = [r for r in range(len(self._siblings)) if r != self._own]
        present = self._agree_on_presence(others)
        indices = [i for i in range(len(self._parameters)) if present[i]]
        for i in indices:
            if self._reducer[i] != self._own:
                parts = [self._part(replica, i) for replica in self._replicas_of(self._own)]
                self._channel.send(self._stream(self._own, self._reducer[i], 1 + 2 * i), parts)
        for i in indices:
            if self._reducer[i] == self._own:
                self._reduce(i, others)
        for i in indices:
            if self._reducer[i] != self._own:
                stream = self._stream(self._reducer[i], self._own, 2 + 2 * i)
                (self._parameters[i].grad,) = self._channel.receive(stream)
        self._channel.flush()
        self._parts = {}

    def _replicas_of(self, sibling: int) -> range:
        return range(sibling, self._replicas, len(self._siblings))

    def _reduce(self, i: int, others: Sequence[int]) -> None:
        parts = {replica: self._part(replica, i) for replica in self._replicas_of(self._own)}
        for sibling in others:
            received = self._channel.receive(self._stream(sibling, self._own, 1 + 2 * i))
            parts.update(zip(self._replicas_of(sibling), received, strict=True))
        total = parts[0].clone()
        for replica in range(1, self._replicas):
            total.add_(parts[replica])
        for sibling in others:
            self._channel.send(self._stream(self._own, sibling, 2 + 2 * i), (total,))
        self._parameters[i].grad = total

    def _agree_on_presence(self, others: Sequence[int]) -> list[bool]:
        there = [
            any(part[i] is not None for part in self._parts.values()) for i in range(len(self._parameters))
        ]
        mine = torch.tensor(there, dtype=torch.bool)
        for sibling in others:
            self._channel.send(self._stream(self._own, sibling, 0), (mine,))
        union = mine.clone()
        for sibling in others:
            union |= self._channel.receive(self._stream(sibling, self._own, 0))[0].cpu()
        return union.tolist()

    def _part(self, replica: int, i: int) -> Tensor:
        part = self._parts[replica][i]
        return canonical(torch.zeros_like(self._parameters[i]) if part is None else part)

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
