"""Bytes that each layer of a chain keeps of one microbatch, counted in storages during real passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workers.layers.layer import Tensors
from workers.profiling.chain import Chain, Flight
from workers.profiling.counted_memory import LiveStorages


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """One layer, one microbatch; the fields of `LayerProfile` of these names."""

    activation_bytes: int
    input_bytes: int
    weight_grad_hold_bytes: int
    boundary_bytes: int
    boundary_grad_bytes: int
    working_bytes: int
    forward_working_bytes: int
    backward_working_bytes: int
    loss_bytes: int
    loss_input_bytes: int


def count_bytes(chain: Chain, begin: Callable[[], Flight], fresh: bool) -> list[LayerBytes]:
    """Per layer of `chain`, what it keeps. Gradients are left in the parameters.

    Args:
        begin: a microbatch before its first layer.
        fresh: whether no layer before the first keeps its inputs.
    """
    numbers = range(len(chain.layers))
    with LiveStorages() as live:
        # The first passes make what lasts (gradients, scratch, casts), which is then part of the background.
        live.add(tensor for layer in chain.layers for tensor in layer.module.parameters())
        counting = _Counting(live, chain, begin, fresh)
        for _ in range(2):
            counting.holds()
        activations = counting.activations()
        counting.loss_keeps()
        holds = counting.holds()
        counting.backwards()
    return [
        LayerBytes(
            activation_bytes=activations[number],
            input_bytes=counting.inputs[number],
            weight_grad_hold_bytes=holds[number],
            boundary_bytes=counting.outputs[number],
            boundary_grad_bytes=counting.output_grads[number],
            working_bytes=counting.working[number],
            forward_working_bytes=counting.forward_working[number],
            # What forming weight gradients takes on top depends on the plan (`GradientMemory.forming`).
            backward_working_bytes=min(counting.working[number], counting.backward_working[number]),
            loss_bytes=counting.loss if number == numbers[-1] else 0,
            loss_input_bytes=counting.loss_inputs if number == numbers[-1] else 0,
        )
        for number in numbers
    ]


class _Counting:
    """Two flights through a chain, dropped layer by layer from the last one on: what dies with a pass is what that
    layer keeps and none before it does."""

    def __init__(self, live: LiveStorages, chain: Chain, begin: Callable[[], Flight], fresh: bool) -> None:
        self._live = live
        self._chain = chain
        self._begin = begin
        self._fresh = fresh
        layers = len(chain.layers)
        self.inputs, self.outputs, self.output_grads = [0] * layers, [0] * layers, [0] * layers
        self.working, self.forward_working, self.backward_working = [0] * layers, [0] * layers, [0] * layers
        self.loss = self.loss_inputs = 0
        """Bytes that the loss keeps, the last layer's outputs among them; bytes of those outputs; 0 without a loss."""

    def activations(self) -> list[int]:
        flight = self._forward(self._fresh)
        return self._drop(flight, lambda number: None)

    def loss_keeps(self) -> None:
        flight = self._forward(self._fresh)
        if flight.loss_pass is None:
            return
        flight.tensors = ()
        self.loss_inputs = _bytes(flight.loss_pass.inputs)
        # As where the layer recomputes: its own activations are dropped first.
        flight.passes.pop()
        before = self._live.live_bytes
        flight.loss_pass = None
        self.loss = before - self._live.live_bytes

    def holds(self) -> list[int]:
        flight = self._back(self.working, weights=False)
        return self._drop(flight, lambda number: self._form(number, flight))

    def backwards(self) -> None:
        """Working memory of a backward pass that forms the weight gradients at once, freeing what they are made of."""
        self._back(self.backward_working, weights=True)

    def _back(self, working: list[int], *, weights: bool) -> Flight:
        # The layer before has dropped its outputs by now.
        flight = self._forward(True)
        if flight.loss_pass is None:
            flight.tensors = tuple(t.detach().clone() for t in flight.tensors if t.requires_grad)
        for number in reversed(range(len(flight.passes))):
            self._watched(
                working,
                number,
                lambda number=number: self._chain.input_grad(number, flight, weights=weights),
            )
        return flight

    def _form(self, number: int, flight: Flight) -> None:
        for _ in self._chain.weight_grads(number, flight):
            pass

    def _forward(self, fresh: bool) -> Flight:
        flight = self._begin()
        # Each microbatch reads targets of its own; the loss keeps them if it needs them.
        flight.targets = tuple(t.clone() for t in flight.targets)
        if fresh:
            flight.tensors = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in flight.tensors)
        last = len(self._chain.layers) - 1
        for number in range(last + 1):
            self.inputs[number] = _bytes(flight.tensors)
            self._watched(
                self.forward_working, number, lambda number=number: self._chain.forward(number, flight)
            )
            if flight.loss_pass is None:
                self.outputs[number] = _bytes(flight.tensors)
                self.output_grads[number] = _bytes(tuple(t for t in flight.tensors if t.requires_grad))
        flight.targets = ()
        return flight

    def _watched(self, working: list[int], number: int, action: Callable[[], None]) -> None:
        before = self._live.live_bytes
        self._live.restart()
        action()
        lasting = max(before, self._live.live_bytes)
        working[number] = max(working[number], self._live.peak_bytes - lasting)

    def _drop(self, flight: Flight, use_up: Callable[[int], None]) -> list[int]:
        # The result of the last action leaves as a message, or is dropped.
        flight.tensors = ()
        dropped = []
        while flight.passes:
            before = self._live.live_bytes
            use_up(len(flight.passes) - 1)
            flight.passes.pop()
            flight.loss_pass = None
            dropped.append(before - self._live.live_bytes)
        return dropped[::-1]


def _bytes(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors)
