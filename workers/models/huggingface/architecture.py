"""Description of an architecture, one of `architectures/`: layers, names of tensors in the source, ties, task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Literal

from torch import nn

from workers.models.huggingface.library import Config
from workers.state.layer_state import ParameterRef

Task = Literal[
    "language", "masked-language", "sequence-classification", "question-answering", "image-classification"
]
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


def no_ties(model: Model) -> Ties:
    """The ties of a model without any."""
    return ()


@dataclass(frozen=True)
class Architecture:
    """Models that are cut in one way."""

    classes: Mapping[str, tuple[str, Task]]
    """Class of transformers, as `architectures` of a config.json names it -> its model type and what it is for."""
    layers: Callable[[Model], tuple[SourceLayer, ...]]
    ties: Callable[[Model], Ties] = no_ties


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
