"""Inputs of each layer in training, found by running the model layer by layer, without values where possible."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from workers.layers.compiled.tapped import Like
from workers.models.definition import LayerBuilder, ModelDefinition
from workers.models.outline import sketch
from workers.reproducibility import rng
from workers.reproducibility.canonical import contiguous_strides, has_channels_last
from workers.state.precision import autocast, boundary_dtype, cast_floats, cast_parameters

Inputs = tuple[Like, ...]


def inputs_of_layers(
    definition: ModelDefinition, first: Sequence[Tensor], precision: str, device: torch.device
) -> tuple[list[Inputs], str]:
    """The inputs of each layer for one microbatch, up to the layer whose outputs cannot be told.

    Args:
        first: those of the first layer.

    Returns:
        Them; and why the list ends where it is shorter than the model.
    """
    found = [tuple(map(_canonical, first))]
    for builder in definition.layers[:-1]:
        try:
            outputs = _outputs(builder, found[-1], precision, device)
        except Exception as error:
            line = (str(error).strip().splitlines() or [""])[0]
            return found, f"layer {builder.name} gives it nothing on zeros: {type(error).__name__}: {line}"
        found.append(tuple(map(_canonical, outputs)))
    return found, ""


def _outputs(
    builder: LayerBuilder, inputs: Inputs, precision: str, device: torch.device
) -> tuple[Tensor, ...]:
    """Outputs of the layer for such inputs: without values, or for zeros where it looks at values."""
    try:
        with FakeTensorMode():
            module = sketch(builder).train()
            without_values(module, precision, device)
            return _run(module, tuple(like.tensor() for like in inputs), precision, device)
    except Exception:  # whatever a builder or a layer may do with values
        with rng.keyed(0, device):
            module = builder.build().train().to(device)
            for name, dtype in cast_parameters(module, precision).items():
                parameter = module.get_parameter(name)
                parameter.data = parameter.data.to(dtype)
            zeros = tuple(
                torch.zeros_like(like.tensor(), device=device, requires_grad=False) for like in inputs
            )
            return _run(module, zeros, precision, device)


def _run(
    module: nn.Module, inputs: tuple[Tensor, ...], precision: str, device: torch.device
) -> tuple[Tensor, ...]:
    cast = boundary_dtype(precision)
    with torch.no_grad(), autocast(precision, device):
        outputs = module(*cast_floats(inputs, cast))
    return cast_floats((outputs,) if isinstance(outputs, Tensor) else tuple(outputs), cast)


def without_values(module: nn.Module, precision: str, device: torch.device) -> None:
    """Move a sketch to `device`, in what `precision` holds it, with undefined values."""
    casts = cast_parameters(module, precision)
    dtypes = {id(p): casts[name] for name, p in module.named_parameters() if name in casts}

    def moved(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=dtypes.get(id(tensor), tensor.dtype), device=device)

    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(moved(parameter), requires_grad=parameter.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = moved(buffer)


def _canonical(tensor: Tensor) -> Like:
    """Metadata of `tensor` as it arrives at a layer."""
    shape = tuple(map(int, tensor.shape))
    strides = tuple(map(int, tensor.stride())) if has_channels_last(tensor) else contiguous_strides(shape)
    return Like(shape, strides, tensor.dtype, tensor.device, requires_grad=False)
