"""Makes a `ModelDefinition` of what a user's model factory returned, or says why that cannot be.

Accepted: a `ModelDefinition`, or `(layers, loss)` with layers a list of `LayerBuilder`, of `(name, builder)`
pairs, or of bare zero-argument builders, which are named layer0, layer1, ... Knows nothing of how the factory
was found.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

from workers.models.definition import LayerBuilder, ModelDefinition
from workers.models.trained_loss import with_loss
from workers.protocol.errors import JobError

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_WRAP = (
    "return a builder that makes it, such as functools.partial(torch.nn.Linear, 64, 10),"
    " so that each layer is built only where it is held"
)


def as_definition(returned: Any, origin: str) -> ModelDefinition:
    """The definition that `returned` amounts to.

    `origin` opens every message, e.g. "model.factory = 'nets:build'".

    Raises:
        JobError: it is none of what a factory may return.
    """
    if isinstance(returned, ModelDefinition):
        layers, loss = returned.layers, returned.loss
        ties, language, measure = returned.ties, returned.language, returned.measure
    elif isinstance(returned, tuple) and len(returned) == 2:
        layers, loss = returned
        ties, language, measure = (), False, None
    elif isinstance(returned, nn.Module):
        raise JobError(
            f"{origin} returned one built {type(returned).__name__}: return (layers, loss) instead, with a"
            " list of builders"
        )
    else:
        raise JobError(
            f"{origin} returned {_describe(returned)}: return (layers, loss) or a"
            " workers.models.definition.ModelDefinition"
        )
    if not isinstance(layers, (list, tuple)):
        raise JobError(f"{origin} returned layers that are {_describe(layers)}: {_list_hint(layers)}")
    if not layers:
        raise JobError(f"{origin} returned no layers: a model has at least one")
    builders = tuple(_builder(item, index, origin) for index, item in enumerate(layers))
    _check_names(builders, origin)
    names = [builder.name for builder in builders]
    for ref in (ref for group in ties for ref in group):
        if ref.layer not in names:
            raise JobError(f"{origin} ties {ref}, but its layers are {', '.join(names)}")
    definition = ModelDefinition(builders, _loss(loss, origin), tuple(map(tuple, ties)), language, measure)
    return with_loss(definition)


def _loss(loss: Any, origin: str) -> Callable[..., Tensor]:
    if isinstance(loss, type) or not callable(loss):
        what = f"the class {loss.__name__}" if isinstance(loss, type) else _describe(loss)
        raise JobError(
            f"{origin} returned a loss that is {what}: return a function of (outputs, targets), such as"
            " torch.nn.functional.cross_entropy"
        )
    return cast(Callable[..., Tensor], loss)


def _builder(item: Any, index: int, origin: str) -> LayerBuilder:
    name: Any = f"layer{index}"
    build: Any = item
    if isinstance(item, LayerBuilder):
        name, build = item.name, item.build
    elif isinstance(item, (tuple, list)) and len(item) == 2:
        name, build = item
    where = f"{origin}: layer {index}"
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise JobError(f"{where} is named {name!r}: a name has letters, digits, '_' and '-' only")
    if isinstance(build, nn.Module):
        raise JobError(f"{where} ({name}) is an already built {type(build).__name__}: {_WRAP}")
    if not callable(build):
        raise JobError(f"{where} ({name}) is {_describe(build)}, not a builder: {_WRAP}")
    _check_takes_no_arguments(build, f"{where} ({name})")
    return LayerBuilder(name, cast(Callable[[], nn.Module], build))


def _check_takes_no_arguments(build: Callable[..., Any], where: str) -> None:
    try:
        signature = inspect.signature(build)
    except ValueError:  # some builtins have no signature; a call shows what is wrong
        return
    try:
        signature.bind()
    except TypeError as error:
        raise JobError(
            f"{where} has a builder that cannot be called without arguments ({error}):"
            " bind them with functools.partial"
        ) from error


def _check_names(builders: tuple[LayerBuilder, ...], origin: str) -> None:
    first_use: dict[str, int] = {}
    for index, builder in enumerate(builders):
        earlier = first_use.setdefault(builder.name, index)
        if earlier != index:
            raise JobError(
                f"{origin}: layers {earlier} and {index} are both named {builder.name!r}:"
                " give each its own name, it keys the layer's random draws and its checkpoint files"
            )


def _list_hint(layers: Any) -> str:
    if isinstance(layers, nn.Module):
        return f"these are already built; {_WRAP}"
    return "return a list, one builder per layer"


def _describe(value: Any) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"
