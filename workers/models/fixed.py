"""Parameters that a job does not train, by patterns of their names (`model.fixed`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial

from torch import nn

from workers.models.definition import LayerBuilder, ModelDefinition
from workers.protocol.errors import JobError
from workers.state.layer_state import ParameterRef


def with_fixed(definition: ModelDefinition, patterns: Sequence[str]) -> ModelDefinition:
    """`definition` without training the parameters whose names, `LAYER.PARAMETER`, match one of `patterns`."""
    layers = tuple(
        LayerBuilder(layer.name, partial(_with_fixed, layer, tuple(patterns))) for layer in definition.layers
    )
    return replace(definition, layers=layers, fixed=tuple(patterns))


def _with_fixed(builder: LayerBuilder, patterns: Sequence[str]) -> nn.Module:
    module = builder.build()
    if isinstance(module, nn.Module):  # else it is refused where it is looked at
        for name, parameter in module.named_parameters():
            if any(fnmatchcase(f"{builder.name}.{name}", pattern) for pattern in patterns):
                parameter.requires_grad_(False)
    return module


def check_fixed(
    patterns: Sequence[str], parameters: Collection[ParameterRef], fixed: Collection[ParameterRef]
) -> None:
    """Check `model.fixed` against all parameters of the model.

    Args:
        fixed: those that are not trained.

    Raises:
        JobError: a pattern matches none, or nothing is left to train.
    """
    names = sorted(map(str, parameters))
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            some = ", ".join(names[:4])
            raise JobError(
                f"model.fixed has {pattern!r}, which matches none of the {len(names):,} parameters ({some}, ...): a"
                " pattern is LAYER.PARAMETER, such as embed.*, and freshet plan lists the layers"
            )
    if patterns and len(fixed) == len(names):
        raise JobError(
            f"model.fixed = {list(patterns)} leaves none of the {len(names):,} parameters to train: fix fewer"
        )
