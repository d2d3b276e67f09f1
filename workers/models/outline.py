"""Size of each layer of a model, found without allocating the model.

Knows nothing of stages or partitions.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from workers.models.definition import LayerBuilder, ModelDefinition, ParameterRef
from workers.models.fixed import check_fixed
from workers.models.lora import check_lora
from workers.models.refusals import Refusals
from workers.process.user_code import what_it_did, where
from workers.protocol.errors import JobError
from workers.state.layer_state import saved_tensors

Shapes = Mapping[str, tuple[int, ...]]
"""Tensor -> shape."""


@dataclass(frozen=True, kw_only=True)
class LayerOutline:
    """One layer's size. A tied parameter counts in each layer that uses it: each holds a copy."""

    name: str
    parameters: int
    """Scalars, not tensors."""
    parameter_bytes: int
    shapes: Shapes
    """Weight or persistent buffer -> shape."""
    buffers: bool = False
    """Whether it has persistent buffers: training changes them from microbatch to microbatch."""


def outline(definition: ModelDefinition) -> tuple[LayerOutline, ...]:
    """The size of every layer, in order.

    One layer after another is built on the meta device (on the CPU where that fails) and dropped.

    Raises:
        JobError: a layer cannot be built or is no module, holds what cannot be trained, a tied parameter is missing or
            of another shape.
    """
    weights: dict[str, Shapes] = {}
    fixed: set[ParameterRef] = set()
    outlines = []
    refusals = Refusals()
    with torch.random.fork_rng(devices=[]):
        for builder in definition.layers:
            module = sketch(builder)
            refusals.check(builder.name, module)
            parameters = sum(parameter.numel() for parameter in module.parameters())
            size = sum(parameter.nbytes for parameter in module.parameters())
            own, buffers = ({n: tuple(t.shape) for n, t in group.items()} for group in saved_tensors(module))
            outlines.append(
                LayerOutline(
                    name=builder.name,
                    parameters=parameters,
                    parameter_bytes=size,
                    shapes={**own, **buffers},
                    buffers=bool(buffers),
                )
            )
            weights[builder.name] = own
            fixed |= {
                ParameterRef(builder.name, n) for n, p in module.named_parameters() if not p.requires_grad
            }
    names = {ParameterRef(layer, name) for layer, of in weights.items() for name in of}
    check_fixed(definition.fixed, names, fixed)
    if definition.lora is not None:
        check_lora(definition.lora, names)
    _check_ties(definition, weights, fixed)
    return tuple(outlines)


class _NoNormalDraws(TorchFunctionMode):
    """Skips `normal_` on the meta device: nothing is filled there, yet it would import torch's compiler."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.normal_, nn.init.normal_):
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


def sketch(builder: LayerBuilder) -> nn.Module:
    """The layer's module without memory for its parameters, if its builder needs no values of them.

    Raises:
        JobError: it cannot be built, or is no module.
    """
    try:
        with torch.device("meta"), _NoNormalDraws(), warnings.catch_warnings():
            # Torch warns of each tensor that a builder loads: here there is nothing to load into.
            warnings.filterwarnings("ignore", message="for .*: copying from a non-meta parameter")
            module = builder.build()
    except (Exception, SystemExit):  # a builder may read values, which the meta device does not have
        try:
            module = builder.build()
        except (Exception, SystemExit) as error:
            raise JobError(
                f"layer {builder.name!r} could not be built: its builder {what_it_did(error)}{where(error)}"
            ) from error
    if not isinstance(module, nn.Module):
        raise JobError(
            f"the builder of layer {builder.name!r} returned a {type(module).__name__}: it must return a"
            " torch.nn.Module"
        )
    return module


def _check_ties(definition: ModelDefinition, weights: Mapping[str, Shapes], fixed: Set[ParameterRef]) -> None:
    for group in definition.ties:
        first, *others = group
        still = [str(ref) for ref in group if ref in fixed]
        if still and len(still) < len(group):
            raise JobError(
                f"{', '.join(still)} is tied and has requires_grad = False, which"
                f" {', '.join(str(ref) for ref in group if ref not in fixed)} has not: set it for all of them or none"
                " (in model.fixed, name all)"
            )
        for ref in group:
            if ref.parameter not in weights.get(ref.layer, {}):
                raise JobError(
                    f"{ref} is tied, but layer {ref.layer!r} has no parameter {ref.parameter!r}"
                    " (where a layer uses one under several names, give the first)"
                )
        first_shape = weights[first.layer][first.parameter]
        for ref in others:
            shape = weights[ref.layer][ref.parameter]
            if shape != first_shape:
                raise JobError(
                    f"{first} of shape {list(first_shape)} and {ref} of shape {list(shape)} are tied:"
                    " tied parameters must have one shape"
                )
