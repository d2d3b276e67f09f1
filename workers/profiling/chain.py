"""Consecutive layers driven one by one, with the very passes that training makes: what the profiler measures.

Knows no schedule and no other rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from workers.layer_check.check import LayerCheck
from workers.layers.deferred.queue import Accumulator
from workers.layers.layer import Layer, Pass, Tensors
from workers.layers.loss import Loss
from workers.reproducibility import rng
from workers.state.layer_state import LayerState


@dataclass
class Flight:
    """One microbatch on its way through the chain."""

    microbatch: int
    tensors: Tensors
    """Inputs of the next layer, forward; output gradients of the next one, backward."""
    targets: Tensors
    """Inputs of the loss beside the last layer's outputs."""
    passes: list[Pass] = field(default_factory=list)
    loss_pass: Pass | None = None


class Chain:
    """Consecutive layers of a model.

    Args:
        layers: in order.
        loss: the loss that follows, if the last of them is the model's last.
        seed: keys the random draws.
        check: compares each layer with plain autograd before its first pass; None: nobody does.
    """

    def __init__(
        self,
        layers: Sequence[tuple[Layer, LayerState]],
        loss: Loss | None,
        seed: int,
        check: LayerCheck | None = None,
    ) -> None:
        self.layers = [layer for layer, _ in layers]
        self.states = [state for _, state in layers]
        self._loss = loss
        self._seed = seed
        self._check = check

    def reads(self, number: int) -> bool:
        """Whether layer `number` takes the batch's inputs, or the loss that takes its targets follows."""
        return self.layers[number].index == 0 or (self._loss is not None and number == len(self.layers) - 1)

    def forward(self, number: int, flight: Flight) -> None:
        """The forward pass of layer `number`; of the last one, the loss's too."""
        layer = self.layers[number]
        draw_key = rng.key(self._seed, "forward", 0, flight.microbatch, layer.name)
        if self._check is not None:
            self._check.compare(layer, flight.tensors, draw_key, 0)
        flight.tensors, done = layer.forward(flight.tensors, draw_key, keep=True)
        flight.passes.append(done)
        if self._loss is not None and number == len(self.layers) - 1:
            draw_key = rng.key(self._seed, "loss", 0, flight.microbatch)
            loss, flight.loss_pass = self._loss.forward(flight.tensors, flight.targets, draw_key, keep=True)
            flight.tensors = (loss,)

    def input_grad(self, number: int, flight: Flight, *, weights: bool = False) -> None:
        """The input gradient of layer `number`; of the last one, the loss's first.

        Args:
            weights: whether its weight gradients are formed at once.
        """
        if flight.loss_pass is not None:
            assert self._loss is not None
            grads = self._loss.backward(flight.loss_pass)
            flight.tensors = tuple(grad for grad in grads if grad is not None)
            flight.loss_pass = None
        flight.tensors = self.layers[number].backward(flight.passes[number], flight.tensors, weights=weights)

    def weight_grads(self, number: int, flight: Flight) -> Iterator[Accumulator | None]:
        """Form the weight gradients of layer `number`, one per step of the iteration; None stands for the second walk
        of the graph that the uncovered parameters take."""
        done = flight.passes[number]
        while (accumulator := done.queue.form_next()) is not None:
            yield accumulator
        self.layers[number].weight_grad(done)
        if self.layers[number].uncovered and not self.layers[number].whole:
            yield None

    def forget_gradients(self) -> None:
        """Forget the gradients, as at the end of a step."""
        for layer in self.layers:
            for parameter in layer.module.parameters():
                parameter.grad = None
