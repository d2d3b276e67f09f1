"""Gradients that a pipeline keeps apart with uneven shares: a sum for each part of a replica, not one for all it does.

A window's microbatches may be of several parts (`planner/shares.py`), and a schedule with split backwards works on two
at once. Before a layer's gradients of a microbatch are added, its parameters have the sum of its part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from planner.shares import Part
from workers.state.flat import NO_GRADIENTS, FlatGradients, GradientBuffers


class Apart(Protocol):
    """Keeps gradients of different microbatches apart while they are formed."""

    def open(self, layer: int, microbatch: int) -> None:
        """Gradients of `layer` are those of (global) `microbatch` from now on."""
        ...

    def close(self, layer: int, microbatch: int, *, whole: bool) -> None:
        """They are formed; `whole`: with all that the microbatch has."""
        ...

    def so_far(self, layer: int) -> FlatGradients:
        """The sums of `layer` at hand."""
        ...


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

    def open(self, layer: int, microbatch: int) -> None:
        """Have what is added to gradients of `layer` from now on count for the part of (global) `microbatch`."""
        part = self._of[microbatch]
        before, summed = self._open.get(layer), self._layers[layer]
        if before == part:
            return
        if before is not None:
            self._kept[before, layer] = summed.taken()
        self._open[layer] = part
        summed.put(self._kept.get((part, layer), NO_GRADIENTS))

    def close(self, layer: int, microbatch: int, *, whole: bool) -> None:
        """The gradients stay where they are until others are opened."""

    def so_far(self, layer: int) -> FlatGradients:
        """The sums that its parameters have."""
        return self._layers[layer].gathered()

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
