"""Floating-point operations of a sample: those of a model's forward and backward passes, counted on tensors without
values.

Counted are products of matrices, convolutions and attention, as PyTorch's own counter does, and of what is trained
alone: a fixed weight has no gradient. Not counted is what a plan repeats: a recomputed forward pass (PaLM, appendix B,
"model FLOPs").
"""

from __future__ import annotations

from typing import Any

import torch

from workers.data.dataset import Batch, Dataset
from workers.models.definition import ModelDefinition
from workers.models.outline import sketch
from workers.process.dispatch_mode import DispatchMode
from workers.profiling.roofline import flops_of

META = torch.device("meta")


class FlopCount(DispatchMode):
    """Inside the context it adds up the floating-point operations of every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        self.flops += flops_of(func, args, kwargs or {}, results) or 0.0
        return results


def flops_per_sample(definition: ModelDefinition, data: Batch | Dataset) -> float | None:
    """Floating-point operations of one sample's forward and backward passes through all layers; None where a layer
    needs values of its tensors, or where there are none of these operations. Imports PyTorch's compiler.

    Args:
        data: some training samples, or where to read one.
    """
    try:
        batch = data if isinstance(data, Batch) else data.train([0])
        tensors = tuple(tensor.to(META) for tensor in batch.inputs)
        samples = len(tensors[0])
        with torch.random.fork_rng(devices=[]), FlopCount() as count:
            for builder in definition.layers:
                outputs = sketch(builder).to(META)(*tensors)
                tensors = outputs if isinstance(outputs, tuple) else (outputs,)
            trained = [tensor for tensor in tensors if tensor.requires_grad]
            torch.autograd.backward(trained, [torch.empty_like(tensor) for tensor in trained])
    except (Exception, SystemExit):  # code of the user's may do anything, and the ranks tell of it
        return None
    return count.flops / samples or None
