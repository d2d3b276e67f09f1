"""Gradients that a pipeline keeps apart with uneven shares: a sum for each part of a replica, not one for all it does.

A window's microbatches may be of several parts (`planner/shares.py`), and a schedule with split backwards works on two
at once. Before a layer's gradients of a microbatch are added, its parameters have the sum of its part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from planner.shares import Part
from workers.state.flat import NO_GRADIENTS, FlatGradients, GradientBuffers


class GradientParts:
    """The gradients of one rank's layers in one step, by part.

    Args:
        parts: those that its pipeline adds up.
        microbatches: of a replica.
        layers: layer -> where its gradients are summed.
    """

    def __init__(
        self, parts: Sequence[Part], microbatches: int, layers: Mapping[int, GradientBuffers]
    ) -> None:
        self._of = {g: part for part in parts for g in part.numbers(microbatches)}
        self._layers = layers
        self._open: dict[int, Part] = {}
        """Layer -> the part whose sums its parameters have."""
        self._kept: dict[tuple[Part, int], FlatGradients] = {}

    def open(self, layers: Iterable[int], microbatch: int) -> None:
        """Have what is added to gradients of `layers` from now on count for the part of (global) `microbatch`."""
        part = self._of[microbatch]
        for layer in layers:
            before, summed = self._open.get(layer), self._layers[layer]
            if before == part:
                continue
            if before is not None:
                self._kept[before, layer] = summed.taken()
            self._open[layer] = part
            summed.put(self._kept.get((part, layer), NO_GRADIENTS))

    def take(self) -> dict[Part, dict[int, FlatGradients]]:
        """Part -> layer -> the sums of the window's gradients. The parameters have none afterwards."""
        for layer, part in self._open.items():
            self._kept[part, layer] = self._layers[layer].taken()
        taken: dict[Part, dict[int, FlatGradients]] = {}
        for (part, layer), gradients in self._kept.items():
            taken.setdefault(part, {})[layer] = gradients
        self.drop()
        return taken

    def drop(self) -> None:
        """Drop all gradients."""
        for layer in self._open:
            self._layers[layer].drop()
        self._open, self._kept = {}, {}
