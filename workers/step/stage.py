"""A stage: consecutive layers on one rank, and what the engine's actions do to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from workers.freezing.mask import NOTHING, Mask
from workers.gradients.parts import Apart
from workers.layer_check.check import LayerCheck
from workers.layers.layer import Layer, Pass, Tensors
from workers.layers.loss import Loss
from workers.reproducibility import rng

Masks = Callable[[int, int], Mask]
"""Layer, global microbatch -> what the layer skips in that microbatch of the current step."""


class Stage:
    """Layers in order, and what they keep of each microbatch in flight.

    Args:
        layers: consecutive layers of the model.
        loss: the loss that follows, if the last of them is the model's last.
        recompute: indices of the layers that drop their activations after the forward pass.
        seed: keys the forward pass's random draws, with the step, the global microbatch and the layer's name.
        masks: which parameters freeze; None for none.
        forward_only: no backward pass follows: this stage, and all before it, are frozen permanently.
        parts: keeps gradients of different microbatches apart; None: there is one sum for all.
        check: compares each layer with plain autograd as it falls due; None: nobody does.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        loss: Loss | None,
        recompute: frozenset[int],
        seed: int,
        *,
        masks: Masks | None = None,
        forward_only: bool = False,
        parts: Apart | None = None,
        check: LayerCheck | None = None,
    ) -> None:
        self.layers = tuple(layers)
        self.loss = loss
        self._recompute = recompute
        self._seed = seed
        self._masks = masks
        self._forward_only = forward_only
        self._parts = parts
        self._check = None if forward_only else check
        self._passes: dict[int, list[Pass]] = {}
        self._loss_passes: dict[int, Pass] = {}
        self._frozen_shares: dict[int, tuple[float, ...]] = {}

    def forward(self, microbatch: int, step: int, inputs: Tensors, targets: Tensors | None) -> Tensors:
        """Run the forward pass of (global) `microbatch`; with a loss, the only output is the scalar loss."""
        tensors = inputs
        passes: list[Pass] = []
        masks = [
            NOTHING if self._masks is None else self._masks(layer.index, microbatch) for layer in self.layers
        ]
        for layer, mask in zip(self.layers, masks, strict=True):
            draw_key = rng.key(self._seed, "forward", step, microbatch, layer.name)
            if self._check is not None:
                self._check.compare(layer, tensors, draw_key, step)
            keep = layer.index not in self._recompute and not self._forward_only
            tensors, done = layer.forward(tensors, draw_key, keep=keep, frozen=mask.frozen)
            passes.append(done)
        if self._forward_only:
            tensors = tuple(t.detach() for t in tensors)
        else:
            self._passes[microbatch] = passes
            self._frozen_shares[microbatch] = tuple(mask.actual for mask in masks)
        if self.loss is None:
            return tensors
        assert targets is not None
        draw_key = rng.key(self._seed, "loss", step, microbatch)
        if self._check is not None:
            self._check.compare_loss(self.loss, tensors, targets, draw_key, step)
        loss, done = self.loss.forward(
            tensors, targets, draw_key, keep=not self._forward_only, frozen=masks[-1].frozen
        )
        if not self._forward_only:
            self._loss_passes[microbatch] = done
        return (loss,)

    def frozen_shares(self, microbatch: int) -> tuple[float, ...]:
        """Per layer, the share of its weight-gradient time that `microbatch` skips; empty before its forward
        pass."""
        return self._frozen_shares.get(microbatch, ())

    @property
    def recomputing(self) -> tuple[int, ...]:
        """The layers that drop their activations after the forward pass."""
        return tuple(layer.index for layer in self.layers if layer.index in self._recompute)

    def recompute(self, microbatch: int) -> None:
        """Rebuild the dropped activations of `microbatch`."""
        for layer, done in zip(self.layers, self._passes[microbatch], strict=True):
            if layer.index in self._recompute:
                layer.recompute(done)

    def backward(
        self,
        microbatch: int,
        grads: Tensors,
        *,
        weights: bool,
        final: Callable[[int], None] | None = None,
    ) -> Tensors:
        """Input gradient of `microbatch`; with `weights`, its weight gradients too.

        Args:
            grads: gradients of the outputs that carry one; ignored if a loss follows.
            final: is called with each layer as soon as its weight gradients are there.

        Returns:
            The gradient of each input that carries one.
        """
        passes = self._passes.pop(microbatch) if weights else self._passes[microbatch]
        if self.loss is not None:
            self._open(self.layers[-1], microbatch)
            outputs = self.loss.backward(self._loss_passes.pop(microbatch))
            grads = tuple(g for g in outputs if g is not None)
        for layer, done in zip(reversed(self.layers), reversed(passes), strict=True):
            self._open(layer, microbatch)
            grads = layer.backward(done, grads, weights=weights)
            self._close(layer, microbatch, whole=weights)
            if final is not None:
                final(layer.index)
        return grads

    def weight_grad(self, microbatch: int, final: Callable[[int], None] | None = None) -> None:
        """Compute the weight gradients that `backward` left queued.

        Args:
            final: is called with each layer as soon as they are there.
        """
        for layer, done in zip(reversed(self.layers), reversed(self._passes.pop(microbatch)), strict=True):
            self._open(layer, microbatch)
            layer.weight_grad(done)
            self._close(layer, microbatch, whole=True)
            if final is not None:
                final(layer.index)

    def _open(self, layer: Layer, microbatch: int) -> None:
        if self._parts is not None:
            self._parts.open(layer.index, microbatch)

    def _close(self, layer: Layer, microbatch: int, *, whole: bool) -> None:
        if self._parts is not None:
            self._parts.close(layer.index, microbatch, whole=whole)

    def summed(self) -> Iterator[Mapping[str, Tensor]]:
        """By layer, the gradients that are summed so far."""
        for layer in self.layers:
            yield layer.gradients() if self._parts is None else self._parts.so_far(layer.index)

    def evaluate(self, inputs: Tensors, targets: Tensors | None) -> Tensors:
        """Forward pass in evaluation mode; the scalar loss if a loss follows and `targets` are given."""
        for layer in self.layers:
            inputs = layer.evaluate(inputs)
        if self.loss is None or targets is None:
            return inputs
        return (self.loss.evaluate(inputs, targets),)

    def drop(self) -> None:
        """Drop the microbatches in flight, and their gradients."""
        self._passes.clear()
        self._loss_passes.clear()
        self._frozen_shares.clear()
        for layer in self.layers:
            layer.drop_gradients()
