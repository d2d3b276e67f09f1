"""A loss that has something to train: it becomes part of the last layer, and is called after it.

So its parameters have a place, copies, checkpoints and an optimizer like any layer's. Knows no pipeline.
"""

from __future__ import annotations

import copy
from collections.abc import Generator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workers.models.definition import LayerBuilder, ModelDefinition
from workers.protocol.errors import JobError

LOSS = "loss"
"""Prefix of a loss's parameters in its layer: `loss.log_variance`."""


class LayerWithLoss(nn.Module):
    """The last layer, with the loss that follows it beside it. Names within the layer are as without the loss."""

    def __init__(self, layer: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.layer_before_loss = layer
        self.loss = loss

    def forward(self, *inputs: Tensor) -> Any:
        """The layer's outputs, without the loss."""
        return self.layer_before_loss(*inputs)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Generator[tuple[str, nn.Module], None, None]:
        memo = set() if memo is None else memo
        yield from self.layer_before_loss.named_modules(memo, prefix, remove_duplicate)
        loss = f"{prefix}.{LOSS}" if prefix else LOSS
        yield from self.loss.named_modules(memo, loss, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Both by their names here; takes no arguments."""
        of_loss = self.loss.state_dict().items()
        return {**self.layer_before_loss.state_dict(), **{f"{LOSS}.{name}": value for name, value in of_loss}}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer_before_loss"), name)


def with_loss(definition: ModelDefinition) -> ModelDefinition:
    """`definition` with its loss in the last layer, if training changes something of it."""
    loss = definition.loss
    if not isinstance(loss, nn.Module) or not loss.state_dict():
        return definition
    if isinstance(loss, torch.jit.ScriptModule):
        raise JobError(
            "the loss is a ScriptModule with parameters or buffers, which the last layer cannot hold: return the module"
            " that it was made of"
        )
    last = definition.layers[-1]
    builder = LayerBuilder(last.name, partial(_build, last, loss))
    return replace(definition, layers=(*definition.layers[:-1], builder))


def _build(builder: LayerBuilder, loss: nn.Module) -> nn.Module:
    layer = builder.build()
    if not isinstance(layer, nn.Module):
        return layer
    if hasattr(layer, LOSS):
        raise JobError(
            f"layer {builder.name} has an attribute {LOSS!r}, the name under which the loss keeps what it trains: give"
            " it another name"
        )
    for name, parameter in loss.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise JobError(
                f"the loss has a hook on its parameter {name}, which the copy of it that the last layer holds would"
                " lose: change the gradient in the forward pass, by an autograd function"
            )
    shared = {id(tensor): tensor for tensor in (*layer.parameters(), *layer.buffers())}
    try:
        return LayerWithLoss(layer, copy.deepcopy(loss, shared))
    except Exception as error:
        raise JobError(
            f"the loss cannot be copied, as the last layer holds it beside its own module: {type(error).__name__}:"
            f" {error}. copy.deepcopy must copy what it holds: no locks, no open files, no tensors that are results"
        ) from error


def loss_beside(module: nn.Module) -> nn.Module | None:
    """The loss that is part of a layer's module."""
    return module.loss if isinstance(module, LayerWithLoss) else None


def layer_alone(module: nn.Module) -> nn.Module:
    """A layer's module without the loss that may be part of it."""
    return module.layer_before_loss if isinstance(module, LayerWithLoss) else module
