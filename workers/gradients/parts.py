"""Gradients that a pipeline keeps apart until the end of a step: a sum for each part of a replica that it executes.

Its microbatches may be of several replicas, or with uneven shares of several parts (`planner/shares.py`), and a
schedule with split backwards works on two at once. Before a layer's gradients of a microbatch are added, its parameters
have the sum of its part.
"""

from __future__ import annotations

from collections.abc import Mapping

from planner.shares import ReplicaPart
from workers.gradients.exchange import ReplicaExchange
from workers.gradients.sink import GradientSink
from workers.state.flat import NO_GRADIENTS, FlatGradients, GradientBuffers


class GradientParts(GradientSink):
    """Keeps gradients apart by part, and reduces them over replicas at the end of the step.

    Args:
        microbatches: of a replica.
    """

    def __init__(
        self, exchange: ReplicaExchange, microbatches: int, layers: Mapping[int, GradientBuffers]
    ) -> None:
        super().__init__(layers)
        self._exchange = exchange
        self._of = {g: part for part in exchange.own_parts for g in part.numbers(microbatches)}
        self._open: dict[int, ReplicaPart] = {}
        """Layer -> the part whose sums its parameters have."""
        self._kept: dict[ReplicaPart, dict[int, FlatGradients]] = {}

    def begin(self, layer: int, microbatch: int) -> None:
        part, before, summed = self._of[microbatch], self._open.get(layer), self._layers[layer]
        if before == part:
            return
        if before is not None:
            self._kept.setdefault(before, {})[layer] = summed.taken()
        self._open[layer] = part
        summed.put(self._kept.get(part, {}).get(layer, NO_GRADIENTS))

    def reduce(self) -> None:
        for layer, part in self._open.items():
            self._kept.setdefault(part, {})[layer] = self._layers[layer].taken()
        kept, self._open, self._kept = self._kept, {}, {}
        self._exchange.sum(kept)

    def drop(self) -> None:
        super().drop()
        self._exchange.drop()
        self._open, self._kept = {}, {}
