"""Description of an architecture, one of `architectures/`: layers, names of tensors in the source, ties, task."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from workers.models.documents import with_where
from workers.models.huggingface.library import Config
from workers.protocol.errors import JobError
from workers.protocol.section import Units
from workers.state.layer_state import ParameterRef

Task = Literal[
    "language", "masked-language", "sequence-classification", "question-answering", "image-classification"
]
Halves = tuple[Callable[[Any], nn.Module], Callable[[Any], nn.Module]]
"""Makers of the attention's and the feed-forward layer's module, of the module of a block's layer."""
HALVES = ("attention", "feed_forward")
Ties = tuple[tuple[ParameterRef, ...], ...]
"""Groups of parameters that are one, as in `ModelDefinition`."""


@dataclass(frozen=True)
class Model:
    """A model of transformers, not built."""

    name: str
    """Its class."""
    module: ModuleType
    """The module of transformers that defines the class."""
    config: Config
    task: Task


@dataclass(frozen=True)
class SourceLayer:
    """One layer, made of modules of transformers."""

    name: str
    make: Callable[[], nn.Module]
    """Makes the module, on the meta device: its values come later."""
    source: Mapping[str, str]
    """Path of a module in the layer, empty for the whole -> its path in the model of transformers."""

    def source_key(self, tensor: str) -> str:
        """The name in the model of transformers of the layer's `tensor`.

        Raises:
            KeyError: it is in none of the modules.
        """
        for own, theirs in self.source.items():
            inside = f"{own}." if own else ""
            if tensor.startswith(inside):
                return f"{theirs}.{tensor.removeprefix(inside)}"
        raise KeyError(tensor)


class TensorValues(Protocol):
    """Values of the tensors of a model of transformers."""

    def keys(self) -> Collection[str]:
        """Names of those that there are."""
        ...

    def fill(self, layer: SourceLayer, module: nn.Module) -> Sequence[Tensor]:
        """Set the tensors of a layer's module to the values that there are; returns those tensors."""
        ...


def no_ties(model: Model) -> Ties:
    """The ties of a model without any."""
    return ()


@dataclass(frozen=True)
class Architecture:
    """Models that are cut in one way.

    Layers whose name begins with `block` are the units of repetition.
    """

    classes: Mapping[str, tuple[str, Task]]
    """Class of transformers, as `architectures` of a config.json names it -> its model type and what it is for."""
    layers: Callable[[Model], tuple[SourceLayer, ...]]
    ties: Callable[[Model], Ties] = no_ties
    halves: Halves | None = None
    """Makes of a block's layer its two halves; None: more than the residual stream lies between them."""

    def layers_of(self, model: Model, units: Units = "blocks") -> tuple[SourceLayer, ...]:
        """The layers of `model`; with halves, `block0-attention` and `block0-feed_forward` in place of `block0`.

        Raises:
            JobError: its blocks have no halves.
        """
        layers = self.layers(model)
        if units == "blocks":
            return layers
        if self.halves is None:
            raise JobError(
                f'model.units = "halves": between the parts of a block of {model.name} lies more than one tensor; leave'
                ' it at "blocks"'
            )
        halves = self.halves
        return tuple(
            each
            for layer in layers
            for each in (_halved(layer, halves) if layer.name.startswith("block") else (layer,))
        )


def _halved(layer: SourceLayer, halves: Halves) -> tuple[SourceLayer, ...]:
    return tuple(
        SourceLayer(f"{layer.name}-{name}", lambda half=half: half(layer.make()), layer.source)
        for name, half in zip(HALVES, halves, strict=True)
    )


class NormedFeedForward(nn.Module):
    """The second residual branch of a block with a norm before each, at the paths that its parts have in the block.

    Args:
        whole: the layer.
        block: path of transformers' block in it.
        norm, feed_forward, dropout: names in the block.
    """

    def __init__(
        self, whole: nn.Module, block: str, norm: str, feed_forward: str, dropout: str | None = None
    ) -> None:
        super().__init__()
        of = whole.get_submodule(block)
        kept = nn.Module() if block else self
        kept.add_module(norm, of.get_submodule(norm))
        kept.add_module(feed_forward, of.get_submodule(feed_forward))
        if block:
            self.add_module(block, kept)
        self._branch = (block, norm, feed_forward)
        self.dropout = nn.Identity() if dropout is None else of.get_submodule(dropout)

    def forward(self, hidden: Tensor, *where: Tensor) -> Tensor | tuple[Tensor, ...]:
        block, norm, feed_forward = self._branch
        of = self.get_submodule(block)
        branch = of.get_submodule(feed_forward)(of.get_submodule(norm)(hidden))
        return with_where(hidden + self.dropout(branch), where)


def numbered(
    count: int, make: Callable[[int], nn.Module], source: Callable[[int], Mapping[str, str]]
) -> tuple[SourceLayer, ...]:
    """Layers `block0`, `block1`, ..."""
    return tuple(SourceLayer(f"block{n}", partial(make, n), source(n)) for n in range(count))


def tied_head(config: Config, embedding: str, head: str) -> Ties:
    """The tie of the embedding's matrix and the head's, where the configuration has one."""
    return (
        ((ParameterRef("embed", embedding), ParameterRef("head", head)),)
        if config.tie_word_embeddings
        else ()
    )
