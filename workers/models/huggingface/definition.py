"""From a model's folder or its config.json to a `ModelDefinition`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.metrics.measure import Measure
from workers.metrics.measures import OfClasses, OfNumbers, OfTokens
from workers.models.definition import LayerBuilder, ModelDefinition
from workers.models.huggingface import generic
from workers.models.huggingface.architecture import Architecture, Model, SourceLayer, Task, TensorValues
from workers.models.huggingface.architectures import bert, convnext_v2, gpt2, llama, resnet, vit
from workers.models.huggingface.library import class_named, draw_, materialized, modeling, parsed
from workers.models.loss import mean_cross_entropy
from workers.protocol.errors import JobError
from workers.protocol.section import Units

ARCHITECTURES: tuple[Architecture, ...] = tuple(
    each.ARCHITECTURE for each in (llama, gpt2, bert, vit, convnext_v2, resnet)
)
"""A new one is a file in `architectures/`, and its name here."""
CLASSES: Mapping[str, Architecture] = {name: one for one in ARCHITECTURES for name in one.classes}
"""Class of transformers -> its architecture."""


def model_of(config: Mapping[str, Any], name: str) -> Model:
    """The model of a class of transformers, not built.

    Args:
        config: fields of its config.json.

    Raises:
        JobError: the class is not known here, transformers is not installed, or a field does not fit.
    """
    if name in CLASSES:
        model_type, task = CLASSES[name].classes[name]
        module = modeling(model_type)
        return Model(name, module, parsed(getattr(module, name), config), task)
    task, found = generic.task_of(name), class_named(name)
    if task is None or found is None:
        ends = ", ".join(f"...{end}" for end in generic.CLASS_ENDS)
        raise JobError(
            f"architectures = [{name!r}] of the model's config.json is not one of {', '.join(sorted(CLASSES))}, nor"
            f" another class of transformers for a task that is known here ({ends}), which is cut at its blocks where"
            " they lie in one list: save the model as one of them, or write a factory that returns its layers"
            " (model.factory)"
        )
    return Model(name, import_module(found.__module__), parsed(found, config), task)


def architecture_of(model: Model) -> Architecture:
    """The way to cut `model`: that of its file, or at its one list of blocks.

    Raises:
        JobError: it has no file, and cannot be cut so.
    """
    return CLASSES.get(model.name) or generic.generic_architecture(model)


def definition_of(model: Model, source: TensorValues | None, units: Units = "blocks") -> ModelDefinition:
    """The layers of `model`, which begin with the tensors of `source`, else with values drawn as transformers does.

    Raises:
        JobError: it has not such units.
    """
    architecture = architecture_of(model)
    loss, measure = _TRAINED_FOR[model.task](model)
    layers, ties = architecture.layers_of(model, units), architecture.ties(model)
    copies = {(use.layer, use.parameter) for group in ties for use in group[1:]}
    return ModelDefinition(
        tuple(
            LayerBuilder(
                layer.name,
                partial(
                    _built, layer, model, source, frozenset(name for at, name in copies if at == layer.name)
                ),
            )
            for layer in layers
        ),
        loss,
        ties,
        language=model.task == "language",
        measure=measure,
        unmatched=None if source is None else partial(_unmatched, layers, copies, source),
    )


def _unmatched(
    layers: Sequence[SourceLayer], copies: Collection[tuple[str, str]], source: TensorValues
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Tensors that the source lacks, and those that no layer has. A tensor with several names needs one of them, and
    `copies` of tied ones, by layer, none."""
    held, left_over = source.keys(), {*source.keys()}
    drawn: set[str] = set()
    for layer in layers:
        with torch.device("meta"):
            state = layer.make().state_dict(keep_vars=True)
        given = {id(tensor) for name, tensor in state.items() if layer.source_key(name) in held}
        left_over -= {layer.source_key(name) for name in state}
        drawn |= {
            layer.source_key(name)
            for name, tensor in state.items()
            if id(tensor) not in given and (layer.name, name) not in copies
        }
    return tuple(sorted(drawn)), tuple(sorted(left_over))


def _built(
    layer: SourceLayer, model: Model, source: TensorValues | None, copies: frozenset[str]
) -> nn.Module:
    """The layer's module. With a source nothing is drawn for `copies`, which ties give their values."""
    if torch.get_default_device().type == "meta":
        return layer.make()
    with torch.device("meta"):
        module = layer.make()
    materialized(module)
    given: list[Tensor] = []
    if source is not None:
        tied = [nn.init.zeros_(tensor) for name, tensor in module.named_parameters() if name in copies]
        given = [*source.fill(layer, module), *tied]
    draw_(module, getattr(model.module, model.name), model.config, given=given)
    return module


def answer_loss(logits: Tensor, first: Tensor, last: Tensor, context: Tensor | None = None) -> Tensor:
    """Mean of the cross-entropies of an answer's first and last token, as transformers takes it.

    Args:
        logits: float[B, T, 2].
        first, last: int64[B]; T and above: the row has no part in the mean.
        context: a target for the metrics alone.
    """
    length = logits.shape[1]
    parts = [
        functional.cross_entropy(logits[..., n].float(), each.clamp(0, length), ignore_index=length)
        for n, each in enumerate((first, last))
    ]
    return (parts[0] + parts[1]) / 2


def square_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean square of the differences, for a regression.

    Args:
        outputs: float[B, 1].
        targets: float[B].
    """
    return functional.mse_loss(outputs.float().squeeze(-1), targets.float())


def _of_classes(model: Model) -> tuple[Callable[..., Tensor], Measure | None]:
    return (square_loss, OfNumbers()) if model.config.num_labels == 1 else (mean_cross_entropy, OfClasses())


def _of_tokens(model: Model) -> tuple[Callable[..., Tensor], Measure | None]:
    return mean_cross_entropy, OfTokens()


_TRAINED_FOR: Mapping[Task, Callable[[Model], tuple[Callable[..., Tensor], Measure | None]]] = {
    "language": _of_tokens,
    "masked-language": _of_tokens,
    "sequence-classification": _of_classes,
    "question-answering": lambda model: (
        answer_loss,
        None,
    ),  # metrics come with the table: they compare texts
    "image-classification": _of_classes,
}
"""Task -> loss and metrics of a model for it."""
