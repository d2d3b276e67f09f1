"""Gradients that a pipeline keeps apart with uneven shares: a sum for each part of a replica, not one for all it does.

A window's microbatches may be of several parts (`planner/shares.py`), and a schedule with split backwards works on two
at once. Before a layer's gradients of a microbatch are added, `.grad` holds the sum of its part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from planner.shares import Part

Gradients = list[Tensor | None]


class GradientParts:
    """The gradients of one rank's layers in one step, by part.

    Args:
        parts: those that its pipeline adds up.
        microbatches: of a replica.
        parameters: layer -> its parameters.
    """

    def __init__(
        self, parts: Sequence[Part], microbatches: int, parameters: Mapping[int, Sequence[nn.Parameter]]
    ) -> None:
        self._of = {g: part for part in parts for g in part.numbers(microbatches)}
        self._parameters = parameters
        self._open: dict[int, Part] = {}
        """Layer -> the part whose sums its parameters' `.grad` hold."""
        self._kept: dict[tuple[Part, int], Gradients] = {}

    def open(self, layers: Iterable[int], microbatch: int) -> None:
        """Have what is added to gradients of `layers` from now on count for the part of (global) `microbatch`."""
        part = self._of[microbatch]
        for layer in layers:
            before = self._open.get(layer)
            if before == part:
                continue
            if before is not None:
                self._keep(before, layer)
            self._open[layer] = part
            absent: Gradients = [None] * len(self._parameters[layer])
            for parameter, gradient in zip(
                self._parameters[layer], self._kept.get((part, layer), absent), strict=True
            ):
                parameter.grad = gradient

    def take(self) -> dict[Part, dict[int, Gradients]]:
        """Part -> layer -> the sums of the window's gradients, by parameter. The parameters have none afterwards."""
        for layer, part in self._open.items():
            self._kept[part, layer] = [parameter.grad for parameter in self._parameters[layer]]
        taken: dict[Part, dict[int, Gradients]] = {}
        for (part, layer), gradients in self._kept.items():
            taken.setdefault(part, {})[layer] = gradients
        self.drop()
        return taken

    def drop(self) -> None:
        """Drop all gradients."""
        for layer in self._open:
            for parameter in self._parameters[layer]:
                parameter.grad = None
        self._open, self._kept = {}, {}

    def _keep(self, part: Part, layer: int) -> None:
        """Set aside the sums of `part`. Copies, unless they are one already: the next part's are formed in the same
        memory."""
        parameters = self._parameters[layer]
        copies = self._kept.get((part, layer), [None] * len(parameters))
        self._kept[part, layer] = [
            gradient if gradient is copy or gradient is None else gradient.clone()
            for gradient, copy in zip((parameter.grad for parameter in parameters), copies, strict=True)
        ]
