"""Times the passes of a chain of layers, repeat by repeat.

A repeat is a small window: the forward passes of a few microbatches through all layers, then their input and weight
gradients, then the update. So a slow moment of the machine affects all layers equally. A repeat's time of
an action is the mean over its microbatches, as actions' times are skewed and a step is their sum; what counts in the
end is the median over repeats.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median

import torch

from planner.ir import Action, ActionKind
from workers.layers.deferred.queue import Accumulator
from workers.layers.layer import Tensors
from workers.profiling.chain import Chain, Flight
from workers.profiling.stopwatch import Stopwatch
from workers.state.optim import Optimizer

TIMED = (ActionKind.FORWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD, ActionKind.UPDATE)


@dataclass(frozen=True)
class FormedGradient:
    """A weight gradient that W forms."""

    accumulator: Accumulator | None
    """None: those of the uncovered parameters, in a second walk of the graph."""
    seconds: float | None
    """None where the device does not tell the parts of an action apart."""


class LayerTimes:
    """The times of one chain.

    Args:
        begin: a microbatch before its first layer.
        read: reads a microbatch as the ranks with the model's first and its last layer do, before these; None: they
            read ahead.
        grads: of the last layer's outputs, where no loss follows.
    """

    def __init__(
        self,
        chain: Chain,
        watch: Stopwatch,
        optimizer: Optimizer,
        begin: Callable[[int], Flight],
        read: Callable[[int], object] | None,
        grads: Tensors,
    ) -> None:
        self._chain = chain
        self._watch = watch
        self._optimizer = optimizer
        self._begin = begin
        self._read = read
        self._grads = grads
        self._formed: list[list[Accumulator | None]] = [[] for _ in chain.layers]
        self._seconds: dict[tuple[ActionKind, int], list[float]] = defaultdict(list)
        """Per action of a layer, its mean in each repeat."""
        self._parts: list[list[list[float]]] = [[] for _ in chain.layers]
        """Per layer and repeat, the mean of each gradient that W forms."""
        self.repeats_s: list[float] = []
        """Per repeat, all layers together."""

    def repeat(self, microbatches: int) -> None:
        """Time one repeat."""
        watch, chain = self._watch, self._chain
        numbers = range(len(chain.layers))
        watch.start()
        flights = [self._begin(microbatch) for microbatch in range(microbatches)]
        for flight in flights:
            for number in numbers:
                self._forward(number, flight)
        for flight in flights:
            if flight.loss_pass is None:
                flight.tensors = self._grads
            for number in reversed(numbers):
                watch.begin()
                chain.input_grad(number, flight)
                self._end(ActionKind.INPUT_GRAD, number, flight)
            flight.tensors = ()
            for number in reversed(numbers):
                self._weight_grads(number, flight)
            flight.passes.clear()
        for number in numbers:
            watch.begin()
            self._update(number)
            self._end(ActionKind.UPDATE, number, flights[0])
        chain.forget_gradients()
        self._record()

    def forget(self) -> None:
        """Drop the repeats so far: they warmed up."""
        self._seconds.clear()
        self._parts = [[] for _ in self._chain.layers]
        self.repeats_s.clear()

    def seconds(self, kind: ActionKind, number: int) -> float:
        """Seconds of the action `kind` of layer `number` of the chain; the median over repeats."""
        return median(self._seconds[kind, number])

    def formed(self, number: int) -> list[FormedGradient]:
        """Weight gradients that W forms in layer `number`, in order."""
        repeats = self._parts[number]
        whole = not self._watch.tells_parts_apart
        return [
            FormedGradient(accumulator, None if whole else median(repeat[part] for repeat in repeats))
            for part, accumulator in enumerate(self._formed[number])
        ]

    def _forward(self, number: int, flight: Flight) -> None:
        self._watch.begin()
        if self._read is not None and self._chain.reads(number):
            self._read(flight.microbatch)
        self._chain.forward(number, flight)
        self._end(ActionKind.FORWARD, number, flight)

    def _weight_grads(self, number: int, flight: Flight) -> None:
        """Form them, each timed by itself where that can be."""
        apart = self._watch.tells_parts_apart
        self._formed[number] = []
        self._watch.begin()
        for accumulator in self._chain.weight_grads(number, flight):
            self._formed[number].append(accumulator)
            if apart:
                self._end(ActionKind.WEIGHT_GRAD, number, flight)
                self._watch.begin()
        if not apart:
            self._end(ActionKind.WEIGHT_GRAD, number, flight)

    def _update(self, number: int) -> None:
        """Update as training does: the layer's norm, then its optimizer step."""
        layer, state = self._chain.layers[number], self._chain.states[number]
        gradients = layer.gradients()
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients.values()]
        if norms and not norms[0].is_meta:
            torch.stack(norms).tolist()
        self._optimizer.update_(state, gradients, 1.0, self._optimizer.lr(0))

    def _end(self, kind: ActionKind, number: int, flight: Flight) -> None:
        self._watch.end(Action(kind, self._chain.layers[number].index, flight.microbatch))

    def _record(self) -> None:
        """Record how long the repeat took."""
        first = self._chain.layers[0].index
        seconds: dict[tuple[ActionKind, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for action, taken_s in self._watch.seconds():
            seconds[action.kind, action.stage - first][action.index].append(taken_s)
        total_s = 0.0
        for number in range(len(self._chain.layers)):
            for kind in TIMED:
                whole = fmean([sum(parts) for parts in seconds[kind, number].values()] or [0.0])
                self._seconds[kind, number].append(whole)
                total_s += whole
            parts = zip(*seconds[ActionKind.WEIGHT_GRAD, number].values(), strict=True)
            self._parts[number].append([fmean(part) for part in parts])
        self.repeats_s.append(total_s)
