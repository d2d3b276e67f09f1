"""A stage: consecutive layers on one rank, and what the engine's actions do to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from workers.freezing.mask import NOTHING, Mask
from workers.gradients.sink import GradientSink
from workers.layer_check.check import LayerCheck
from workers.layers.layer import Layer, Pass, Tensors
from workers.layers.loss import Loss
from workers.reproducibility import rng


class StepFreezing(Protocol):
    """Freezing of the current step: see `workers.freezing.freezer.Freezer`."""

    @property
    def prefix(self) -> int:
        """Layers of the model, from the input up, that have no backward pass."""
        ...

    @property
    def frozen_mode(self) -> Literal["train", "eval"]:
        """Mode of these."""
        ...

    def mask(self, layer: int, microbatch: int) -> Mask:
        """Parameters that `layer` skips in the (global) `microbatch`."""
        ...


class KeptActivations(Protocol):
    """Activations kept after the frozen layers: see `workers.activation_cache.cache.ActivationCache`."""

    @property
    def depth(self) -> int:
        """Layers of the model, from the input up, whose outputs it may keep."""
        ...

    def passed(
        self,
        samples: Sequence[int],
        through: int,
        inputs: Tensors,
        outputs: Tensors,
        *,
        held_out: bool = False,
    ) -> None:
        """A microbatch has gone through `depth` layers, the first `through` of them by what was kept."""
        ...


class Stage:
    """Layers in order, and what they keep of each microbatch in flight.

    Args:
        layers: consecutive layers of the model.
        loss: the loss that follows, if the last of them is the model's last.
        recompute: indices of the layers that drop their activations after the forward pass.
        seed: keys the forward pass's random draws, with the step, the global microbatch and the layer's name.
        sink: takes the gradients.
        freezing: what freezes; None: nothing.
        forward_only: no backward pass follows: `freezing` freezes all layers of this stage in every step.
        check: compares each layer with plain autograd as it falls due; None: nobody does.
        kept: activations after its first layers, if it is the first stage; None: nobody keeps any.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        loss: Loss | None,
        recompute: frozenset[int],
        seed: int,
        sink: GradientSink,
        *,
        freezing: StepFreezing | None = None,
        forward_only: bool = False,
        check: LayerCheck | None = None,
        kept: KeptActivations | None = None,
    ) -> None:
        self.layers = tuple(layers)
        self.loss = loss
        self._recompute = recompute
        self._seed = seed
        self._sink = sink
        self._freezing = freezing
        self._forward_only = forward_only
        self._check = check
        self._kept = kept
        self._passes: dict[int, list[tuple[Layer, Pass]]] = {}
        """Microbatch -> the layers that go back through it, and what they keep of it."""
        self._loss_passes: dict[int, tuple[Pass, Tensor | None]] = {}
        self._frozen_shares: dict[int, tuple[float, ...]] = {}

    def compare_ahead(
        self, microbatch: int, step: int, inputs: Tensors, hand_on: Callable[[Tensors], None]
    ) -> bool:
        """Compare the layers with plain autograd, if that is due, but first hand on the outputs of `microbatch`, which
        another rank waits for. `forward` follows, and makes the same ones.

        Returns:
            Whether `hand_on` was called; see `LayerCheck.compare_ahead`.
        """
        if self._check is None or self._frozen() or not self._check.falls_due(self.layers, step):
            return False
        keys = [rng.key(self._seed, "forward", step, microbatch, layer.name) for layer in self.layers]
        return self._check.compare_ahead(self.layers, inputs, keys, step, hand_on)

    def forward(
        self,
        microbatch: int,
        step: int,
        inputs: Tensors,
        targets: Tensors | None,
        *,
        through: int = 0,
        samples: Sequence[int] = (),
    ) -> Tensors:
        """Run the forward pass of (global) `microbatch`; with a loss, the outputs are the scalar loss and, if it says
        so, the share of the targets that it is a mean over.

        Args:
            through: frozen layers, the first ones, that `inputs` have gone through already.
            samples: those of the microbatch, if what frozen layers make of them may be kept.
        """
        tensors = inputs
        passes: list[tuple[Layer, Pass]] = []
        freezing, frozen = self._freezing, self._frozen()
        assert not self._forward_only or frozen == len(self.layers), "nobody would train its other layers"
        masks = [
            NOTHING if freezing is None else freezing.mask(layer.index, microbatch) for layer in self.layers
        ]
        for number, (layer, mask) in enumerate(zip(self.layers, masks, strict=True)):
            draw_key = rng.key(self._seed, "forward", step, microbatch, layer.name)
            if freezing is not None and number < frozen:
                if number >= through:
                    tensors = layer.forward_frozen(
                        tensors, draw_key, training=freezing.frozen_mode == "train"
                    )
                if self._kept is not None and number + 1 == self._kept.depth:
                    self._kept.passed(samples, through, inputs, tensors)
                continue
            if self._check is not None:
                self._check.compare(layer, tensors, draw_key, step)
            keep = layer.index not in self._recompute
            tensors, done = layer.forward(tensors, draw_key, keep=keep, frozen=mask.frozen)
            passes.append((layer, done))
        if not self._forward_only:
            self._passes[microbatch] = passes
            self._frozen_shares[microbatch] = tuple(mask.actual for mask in masks[frozen:])
        if self.loss is None:
            return tensors
        assert targets is not None
        draw_key = rng.key(self._seed, "loss", step, microbatch)
        if self._check is not None:
            self._check.compare_loss(self.loss, tensors, targets, draw_key, step)
        share = self.loss.share(targets)
        loss, done = self.loss.forward(tensors, targets, draw_key, keep=True, frozen=masks[-1].frozen)
        self._loss_passes[microbatch] = (done, share)
        return (loss,) if share is None else (loss, share)

    def frozen_shares(self, microbatch: int) -> tuple[float, ...]:
        """Per layer that goes back through it, the share of its weight-gradient time that `microbatch` skips; empty
        before its forward pass."""
        return self._frozen_shares.get(microbatch, ())

    @property
    def recomputing(self) -> tuple[int, ...]:
        """The layers that drop their activations after the forward pass."""
        return tuple(layer for layer in self.going_back if layer in self._recompute)

    @property
    def going_back(self) -> tuple[int, ...]:
        """The layers that have a backward pass in this step."""
        return tuple(layer.index for layer in self.layers[self._frozen() :])

    def recompute(self, microbatch: int) -> None:
        """Rebuild the dropped activations of `microbatch`."""
        for layer, done in self._passes[microbatch]:
            if layer.index in self._recompute:
                layer.recompute(done)

    def backward(self, microbatch: int, grads: Tensors, *, weights: bool, last: bool = False) -> Tensors:
        """Input gradient of `microbatch`; with `weights`, its weight gradients too.

        Args:
            grads: gradients of the outputs that carry one; ignored if a loss follows.
            last: each layer's gradients are finished once its weight gradients are there.

        Returns:
            The gradient of each input that carries one.
        """
        passes = self._passes.pop(microbatch) if weights else self._passes[microbatch]
        if self.loss is not None:
            self._sink.begin(self.layers[-1].index, microbatch)
            outputs = self.loss.backward(*self._loss_passes.pop(microbatch))
            grads = tuple(g for g in outputs if g is not None)
        for layer, done in reversed(passes):
            self._sink.begin(layer.index, microbatch)
            grads = layer.backward(done, grads, weights=weights)
            self._end(layer, microbatch, whole=weights, last=last)
        return grads

    def weight_grad(self, microbatch: int, *, last: bool = False) -> None:
        """Compute the weight gradients that `backward` left queued; `last` as for `backward`."""
        for layer, done in reversed(self._passes.pop(microbatch)):
            self._sink.begin(layer.index, microbatch)
            layer.weight_grad(done)
            self._end(layer, microbatch, whole=True, last=last)

    def _frozen(self) -> int:
        """Number of layers, the first ones, that have no backward pass in this step."""
        prefix = 0 if self._freezing is None else self._freezing.prefix
        return min(max(prefix - self.layers[0].index, 0), len(self.layers))

    def _end(self, layer: Layer, microbatch: int, *, whole: bool, last: bool) -> None:
        self._sink.end(layer.index, microbatch, whole=whole)
        if last:
            self._sink.finished(layer.index)

    def evaluate(
        self, inputs: Tensors, targets: Tensors | None, *, through: int = 0, samples: Sequence[int] = ()
    ) -> Tensors:
        """Forward pass in evaluation mode; `through` and `samples` as for `forward`.

        Returns:
            The outputs; if a loss follows and `targets` are given, the scalar loss, its share of the targets (1 if it
            does not say) and the statistics of each sample, float64[B, K].
        """
        tensors = inputs
        for number, layer in enumerate(self.layers):
            if number >= through:
                tensors = layer.evaluate(tensors)
            if self._kept is not None and number + 1 == self._kept.depth:
                self._kept.passed(samples, through, inputs, tensors, held_out=True)
        if self.loss is None or targets is None:
            return tensors
        loss, share = self.loss.evaluate(tensors, targets), self.loss.share(targets)
        return loss, torch.ones(()) if share is None else share, self.loss.measured(tensors, targets)

    def drop(self) -> None:
        """Drop the microbatches in flight."""
        self._passes.clear()
        self._loss_passes.clear()
        self._frozen_shares.clear()
