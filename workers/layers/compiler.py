"""Compiles the layers of a rank before they are trained with.

At a job's start each rank compiles one layer of each kind that the model has. A layer that it builds later, for
instance to take it over while training goes on, is then only traced, which stalls nobody. A layer that cannot be
compiled is not, and `why_not` says why; that depends on the layer alone, never on the rank or on its neighbours.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress

import torch
from torch import Tensor

from workers.layers.blamed import of_the_machine
from workers.layers.compiled.forward import CompiledForward, Untraceable, in_words
from workers.layers.compiled.kernels import Kernels, cause_of
from workers.layers.compiled.shapes import Inputs, inputs_of_layers, without_values
from workers.layers.deferred.queue import Workspace
from workers.layers.layer import Layer
from workers.models.definition import ModelDefinition
from workers.models.outline import sketch
from workers.protocol.errors import JobError
from workers.reproducibility import rng
from workers.state.precision import autocast

Tensors = tuple[Tensor, ...]


class Compiler:
    """The compiler of one rank.

    Args:
        read: reads what the first layer takes of some microbatch.
        threads: torch threads of the thread that trains.
    """

    def __init__(
        self,
        definition: ModelDefinition,
        read: Callable[[], Sequence[Tensor]],
        *,
        precision: str,
        device: torch.device,
        threads: int,
    ) -> None:
        self._definition = definition
        self._read = read
        self._precision = precision
        self._device = device
        self._threads = threads
        self._kernels = Kernels(threads)
        self._turn = threading.Lock()
        self._inputs: list[Inputs] | None = None
        self._ends = ""
        """Why the inputs of later layers are not known."""
        self.why_not: dict[str, str] = {}
        """Layer -> why it is not compiled, of those that were to be."""

    def compile(self, layers: Sequence[Layer]) -> None:
        """Compile the forward passes of `layers`, from any thread.

        Raises:
            JobError: this machine cannot compile.
        """
        torch.set_num_threads(self._threads)  # of this thread: a trace holds for one number
        with self._turn:
            if self._inputs is None:
                self._kernels.check(self._device)
                self._inputs = self._prepare()
            for layer in layers:
                try:
                    layer.compiled = self._compiled(layer, self._inputs)
                    layer.compared = None
                    self.why_not.pop(layer.name, None)
                except Untraceable as error:
                    self.why_not[layer.name] = str(error)

    def close(self) -> None:
        """Delete what was written to disk; compiled layers stay."""
        self._kernels.close()

    def _prepare(self) -> list[Inputs]:
        """Compile one layer of each kind; returns what each layer takes."""
        inputs, self._ends = inputs_of_layers(
            self._definition, tuple(self._read()), self._precision, self._device
        )
        kinds = set[str]()
        for index, builder in enumerate(self._definition.layers[: len(inputs)]):
            module = sketch(builder).train()
            shapes = [(name, p.shape, p.dtype, p.requires_grad) for name, p in module.named_parameters()]
            kind = repr((type(module), str(module), shapes, inputs[index], index == 0))
            if kind in kinds:
                continue
            kinds.add(kind)
            without_values(module, self._precision, self._device)
            layer = Layer(
                index,
                builder.name,
                module,
                precision=self._precision,
                device=self._device,
                workspace=Workspace(),
            )
            with suppress(Untraceable):  # as the layer itself will be found to be
                self._compiled(layer, inputs)
        return inputs

    def _compiled(self, layer: Layer, inputs: list[Inputs]) -> CompiledForward:
        if layer.index >= len(inputs):
            raise Untraceable(self._ends)
        if layer.uncovered:
            raise Untraceable(
                f"it holds matrices outside of modules that defer their gradients ({', '.join(layer.uncovered)})"
            )
        compiled = CompiledForward(layer.name, layer.module, layer.deferral, self._kernels)

        def some() -> Tensors:
            return tuple(
                torch.zeros(like.shape, dtype=like.dtype, device=like.device) for like in inputs[layer.index]
            )

        met = layer.warm(compiled, some)
        if not met:
            raise Untraceable("it does not compute with tensors")
        for trace in met:
            try:
                # Torch replaces methods of all modules while it compiles: no forward pass may run meanwhile.
                with (
                    nullcontext() if trace.known else rng.turn,
                    torch.enable_grad(),
                    autocast(self._precision, self._device),
                ):
                    trace.compile()
            except Exception as error:
                if isinstance(error, JobError) or of_the_machine(cause_of(error)):
                    raise
                raise Untraceable(in_words(error)) from error
        return compiled
