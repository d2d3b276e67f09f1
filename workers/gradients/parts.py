"""Gradients that a pipeline keeps apart: a sum for each part of a replica that it executes.

Where it executes several replicas, each in a window of its own, they are added up window by window, so that it holds
two gradients whatever their number. With uneven shares its microbatches are of several parts (`planner/shares.py`),
which it keeps until the end of the step, and a schedule with split backwards works on two at once: before a layer's
gradients of a microbatch are added, its parameters have the sum of its part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.shares import ReplicaPart
from workers.gradients.exchange import ReplicaExchange
from workers.gradients.sink import GradientSink
from workers.state.flat import NO_GRADIENTS, FlatGradients, GradientBuffers


class GradientParts(GradientSink):
    """Keeps gradients apart by part, and reduces them over replicas at the end of each window.

    Args:
        microbatches: of a replica.
        windows: the parts of all pipelines that are executed in each window of a step.
    """

    def __init__(
        self,
        exchange: ReplicaExchange,
        microbatches: int,
        layers: Mapping[int, GradientBuffers],
        windows: Sequence[Sequence[ReplicaPart]],
    ) -> None:
        super().__init__(layers)
        self._exchange = exchange
        self._windows = windows
        self._begun = self._added = 0
        """Windows of the step that have begun, and those that were added up."""
        self._of = {g: part for part in exchange.own_parts for g in part.numbers(microbatches)}
        self._open: dict[int, ReplicaPart] = {}
        """Layer -> the part whose sums its parameters have."""
        self._kept: dict[ReplicaPart, dict[int, FlatGradients]] = {}

    def begin_step(self, prefix: int) -> None:
        self._exchange.prefix = prefix

    def begin_window(self) -> None:
        if self._begun:
            self._add()
        self._begun += 1

    def begin(self, layer: int, microbatch: int) -> None:
        part, before, summed = self._of[microbatch], self._open.get(layer), self._layers[layer]
        if before == part:
            return
        if before is not None:
            self._kept.setdefault(before, {})[layer] = summed.taken()
        self._open[layer] = part
        summed.put(self._kept.get(part, {}).get(layer, NO_GRADIENTS))

    def reduce(self) -> None:
        # Others may have a window more.
        while self._added < len(self._windows):
            self._add()
        self._begun = self._added = 0

    def _add(self) -> None:
        """Add up the next window's parts."""
        for layer, part in self._open.items():
            self._kept.setdefault(part, {})[layer] = self._layers[layer].taken()
        kept, self._open, self._kept = self._kept, {}, {}
        parts, last = self._windows[self._added], self._added == len(self._windows) - 1
        self._exchange.add(kept, parts, last=last)
        self._added += 1

    def drop(self) -> None:
        super().drop()
        self._exchange.drop()
        self._open, self._kept = {}, {}
        self._begun = self._added = 0
