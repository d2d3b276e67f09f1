"""A stage of a few blocks of the default model on random inputs, run again and again: what neighbours disturb."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from workers.build import build_layers
from workers.models.definition import LayerBuilder, ModelDefinition
from workers.models.loss import mean_cross_entropy
from workers.models.model_config import DEFAULT_MODEL
from workers.profiling.chain import Chain, Flight
from workers.state.optim import make_optimizer
from workers.state.optimizer_config import OptimizerConfig

CONTEXT, HEADS, SAMPLES = 64, 4, 4


@dataclass(frozen=True)
class StageSize:
    """Size of a stage."""

    blocks: int
    width: int


class MeasuredStage:
    """A stage on this machine's CPU or GPU. Its features are those of `planner.features.STAGE` that need no timing."""

    def __init__(self, size: StageSize, device: torch.device | None = None) -> None:
        self._device = device or torch.device("cpu")
        torch.set_num_threads(1)  # as a rank's by default; several would wait for each other
        block = DEFAULT_MODEL.model_copy(
            update={"layers": size.blocks, "width": size.width, "heads": HEADS}
        ).gpt2_block()
        blocks = tuple(LayerBuilder(f"block{index}", block) for index in range(size.blocks))
        built = build_layers(
            ModelDefinition(blocks, mean_cross_entropy),
            range(size.blocks),
            seed=0,
            precision="float32",
            device=self._device,
            optimizer=make_optimizer(OptimizerConfig(), steps=1),
        )
        self._chain = Chain([*built.values()], None, seed=0)
        self._activations = torch.randn(
            SAMPLES, CONTEXT, size.width, generator=torch.Generator().manual_seed(0)
        ).to(self._device)
        parameters = sum(
            parameter.numel() for layer in self._chain.layers for parameter in layer.module.parameters()
        )
        message = self._activations.numel() * self._activations.element_size()
        self.features: Mapping[str, float] = {
            "layers": float(size.blocks),
            "parameters": float(parameters),
            "messages": 2.0 * message,
        }

    def run(self, ended: Callable[[], bool]) -> tuple[float, float]:
        """Run microbatches, at least one, until one begins when `ended` is true.

        Returns:
            Seconds of a microbatch, and the share of it that is forward.
        """
        begun_s = time.perf_counter()
        count, forward_s = 0, 0.0
        while count == 0 or not ended():
            forward_s += self._microbatch()
            count += 1
        whole_s = time.perf_counter() - begun_s
        return whole_s / count, forward_s / whole_s

    def _microbatch(self) -> float:
        chain, numbers = self._chain, range(len(self._chain.layers))
        flight = Flight(0, (self._activations.clone().requires_grad_(),), ())
        begun_s = time.perf_counter()
        for number in numbers:
            chain.forward(number, flight)
        self._wait()
        forward_s = time.perf_counter() - begun_s
        flight.tensors = (torch.ones_like(self._activations),)
        for number in reversed(numbers):
            chain.input_grad(number, flight)
            for _ in chain.weight_grads(number, flight):
                pass
        chain.forget_gradients()
        self._wait()
        return forward_s

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
