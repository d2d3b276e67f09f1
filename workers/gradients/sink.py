"""Where gradients go between a layer's backward pass, which forms them, and the commit. Knows no schedule."""

from __future__ import annotations

from collections.abc import Mapping

from workers.state.flat import FlatGradients, GradientBuffers


class GradientSink:
    """Destination of the gradients of one rank's layers, of one step after the other.

    This one accumulates them in the parameters, as one replica alone needs it. Others keep them apart, reduce them over
    replicas, or send them ahead.

    Args:
        layers: layer -> where its gradients are summed.
    """

    def __init__(self, layers: Mapping[int, GradientBuffers]) -> None:
        self._layers = dict(sorted(layers.items()))

    def begin_step(self, prefix: int) -> None:
        """A step begins in which nobody forms gradients of the first `prefix` layers of the model."""

    def begin_window(self) -> None:
        """The step's first window begins, or its next one."""

    def begin(self, layer: int, microbatch: int) -> None:
        """Gradients of `layer` that are formed from now on are those of this (global) microbatch."""

    def end(self, layer: int, microbatch: int, *, whole: bool) -> None:
        """They are formed; `whole`: with all that the microbatch has. Microbatches are whole in ascending order."""

    def finished(self, layer: int) -> None:
        """The window adds nothing to the gradients of `layer`, nor changes its buffers, but goes on with others."""

    def launched(self) -> None:
        """The device has been given all that it is to compute in this window."""

    def so_far(self, layer: int) -> FlatGradients:
        """The sums of `layer` at hand."""
        return self._layers[layer].gathered()

    def reduce(self) -> None:
        """Have the parameters, or those of the own shard, have the sums over replicas; a gradient absent everywhere
        stays absent. All siblings call it together once their windows are over."""

    def drop(self) -> None:
        """Drop all gradients."""
        for summed in self._layers.values():
            summed.drop()
