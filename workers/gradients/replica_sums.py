"""Gradients of several replicas that one pipeline alone executes, one after the other: added up as each ends.

It holds two gradients of a layer, the sum of the replicas so far and that of the one at hand, whatever their number.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from workers.gradients.sink import GradientSink
from workers.state.flat import FlatGradients, GradientBuffers


class ReplicaSums(GradientSink):
    """Adds up a layer's gradients of replica after replica, in the order and with the bits of `ReplicaExchange`.

    Args:
        microbatches: of a replica; microbatches of a layer come in ascending order.
    """

    def __init__(self, layers: Mapping[int, GradientBuffers], microbatches: int) -> None:
        super().__init__(layers)
        self._microbatches = microbatches
        self._replica: dict[int, int] = {}
        """Layer -> the replica whose gradients its parameters have."""
        self._totals: dict[int, tuple[tuple[Tensor, ...], frozenset[str]]] = {}
        """Layer -> the sum of those before it, by buffer, and the parameters of which any of them has a gradient."""
        self._lacked: set[int] = set()
        """Layers of which a replica before had no gradient, and none before that: they begin from zeros."""

    def begin(self, layer: int, microbatch: int) -> None:
        replica = microbatch // self._microbatches
        if self._replica.setdefault(layer, replica) != replica:
            self._add(layer)
            self._replica[layer] = replica

    def reduce(self) -> None:
        for layer in list(self._replica):
            self._add(layer)
            summed = self._layers[layer]
            if (total := self._totals.pop(layer, None)) is not None:
                buffers, names = total
                summed.put(FlatGradients.of(summed.layouts, buffers, names))
        self._forget()

    def drop(self) -> None:
        super().drop()
        self._forget()

    def _add(self, layer: int) -> None:
        """Add the replica at hand to those before it; one without a gradient of some parameter has zeros."""
        found, before = self._layers[layer].taken(), self._totals.get(layer)
        if not found.buffers:
            if before is None:
                self._lacked.add(layer)
            for buffer in () if before is None else before[0]:
                buffer.add_(0.0)
            return
        if before is None:
            for buffer in found.buffers if layer in self._lacked else ():
                buffer.add_(0.0)
            self._totals[layer] = found.buffers, frozenset(found)
            return
        totals, names = before
        for total, buffer in zip(totals, found.buffers, strict=True):
            total.add_(buffer)
        self._totals[layer] = totals, names | frozenset(found)

    def _forget(self) -> None:
        self._replica, self._totals, self._lacked = {}, {}, set()
