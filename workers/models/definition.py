"""Definition of a model: a list of layer builders, a loss, and which parameters are tied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from workers.metrics.measure import Measure
from workers.models.lora_config import Lora
from workers.state.layer_state import ParameterRef


@dataclass(frozen=True)
class LayerBuilder:
    """One layer, not yet built: the unit of partition, never cut, and never built where it is not held.

    The built module takes the outputs of the layer before as positional arguments (the first layer: the
    batch's inputs) and returns a tensor or a tuple of tensors.
    """

    name: str
    """Unique in the model; letters, digits, `_` and `-`. Keys the layer's random draws."""
    build: Callable[[], nn.Module]
    """Makes the module on the CPU; draws initial values from torch's global generator, keyed beforehand."""


@dataclass(frozen=True)
class ModelDefinition:
    """A model as a list of layers."""

    layers: tuple[LayerBuilder, ...]
    loss: Callable[..., Tensor]
    """`loss(*outputs of the last layer, *targets of the batch)` -> scalar: the mean over the microbatch."""
    ties: tuple[tuple[ParameterRef, ...], ...] = ()
    """Groups of parameters that are one: the first gives the initial value, all get the summed gradient."""
    language: bool = False
    """Whether the last layer returns float[B, T, vocabulary] logits over next tokens: text can be sampled."""
    measure: Measure | None = None
    """Metrics of a validation beside the loss."""
    fixed: tuple[str, ...] = ()
    """Patterns of the parameters that the job does not train (`model.fixed`); the builders know."""
    lora: Lora | None = None
    """Adapters beside its modules (`model.lora`); the builders know."""
    unmatched: Callable[[], tuple[tuple[str, ...], tuple[str, ...]]] | None = None
    """Names, in the files that the builders read, of tensors that these lack, which are drawn, and of those that the
    model has not; None: the builders read no files."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(layer.name for layer in self.layers)

    @property
    def tied_layers(self) -> tuple[tuple[int, ...], ...]:
        """Per tied parameter, the layers that use it."""
        names = self.names
        return tuple(tuple(names.index(use.layer) for use in group) for group in self.ties)
